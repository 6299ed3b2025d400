"""What a request may ask for beside greedy tokens: the same answers, logprobs to the bit, with offloading and without.

On a colocated server, and as copies of one prompt (``n`` above 1) that share host rows in a decode node's radix cache.
"""

import contextlib
from unittest import mock

import pytest
import torch
from harness import mlp_sync, offload
from harness.delivery import Delivery, decode_node
from harness.scheduler import InprocScheduler

from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject
from sglang.srt.managers.io_struct import BatchTokenIDOutput
from sglang.srt.server_args import ServerArgs

PROMPT = offload.prompts([300], seed=5)[0]
NEW_TOKENS = 90  # more than the ring holds
COPY_TOKENS = 21  # rows of all but the last token fill pages with the prompt's


class Residues(BaseGrammarObject):
    """A grammar without a tokenizer: the answer's token ``i`` is ``i`` modulo ``base``."""

    def __init__(self, base):
        super().__init__()
        self.base, self.at = base, 0

    def accept_token(self, token):
        if token % self.base != self.at % self.base:
            raise ValueError(f"{token} at {self.at}")
        self.at += 1

    def is_terminated(self):
        return self.at == 30

    def allocate_vocab_mask(self, vocab_size, batch_size, device):
        return torch.ones((batch_size, vocab_size), dtype=torch.bool)

    def fill_vocab_mask(self, vocab_mask, idx):
        vocab_mask[idx] = torch.arange(vocab_mask.shape[1]) % self.base == self.at % self.base

    @staticmethod
    def move_vocab_mask(vocab_mask, device):
        return vocab_mask.to(device)

    @staticmethod
    def apply_vocab_mask(logits, vocab_mask):
        logits.masked_fill_(~vocab_mask, float("-inf"))

    def copy(self):
        return Residues(self.base)


class GrammarBackend(BaseGrammarBackend):
    def dispatch_regex(self, key_string):
        return Residues(int(key_string))


class Words:
    """As much of a tokenizer as stop strings need."""

    additional_stop_token_ids, eos_token_id = None, 0

    def decode(self, ids, **_):
        return "".join(f"<{token}>" for token in ids)

    def batch_decode(self, many, **_):
        return [self.decode(ids) for ids in many]


def options(tokens):
    """By name, what one request asks for; ``tokens`` are the plain greedy answer to the prompt."""
    return {
        "plain": {},
        "logprobs": {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [1, 2]},
        "stop token": {"stop_token_ids": [tokens[20]], "ignore_eos": False},
        "stop string": {"stop": [f"<{tokens[15]}><{tokens[16]}>"], "ignore_eos": False},
        "grammar": {"regex": "7"},
        "penalties": {"frequency_penalty": -2.0, "presence_penalty": -1.0, "repetition_penalty": 0.6},
        "least tokens": {"min_new_tokens": 12, "stop_token_ids": [tokens[3]], "ignore_eos": False},
        "bias": {"logit_bias": {str(tokens[0]): -100.0}},
    }


def serve(tiny_model, offloading, overlap, retract):
    """By name of the option: tokens, the reason of the end, and all logprobs."""
    on = offload.offload_args() if offloading else {}
    with contextlib.ExitStack() as stack:
        # SGLang pins lists of prompts with logprobs, which needs a GPU.
        stack.enter_context(mlp_sync.pinned_where_there_is_a_gpu())
        engine = stack.enter_context(InprocScheduler(tiny_model, overlap=overlap, **offload.server_args(), **on))
        engine.scheduler.tokenizer = Words()
        engine.scheduler.grammar_manager.grammar_backend = GrammarBackend()
        logprobs = stack.enter_context(recorded_logprobs(engine))
        (plain,) = engine.run([PROMPT], NEW_TOKENS)
        rids = {name: engine.submit(PROMPT, NEW_TOKENS, **more) for name, more in options(plain).items()}
        if retract:
            engine.step_until(lambda: all(len(engine.outputs[rid]) > 3 for rid in rids.values()))
            assert len(engine.retract(3)) == 3
        engine.drain()
        # By itself: a batch that samples breaks ties of greedy requests by chance.
        torch.manual_seed(0)
        rids["sampled"] = engine.submit(PROMPT, NEW_TOKENS, temperature=0.8, top_p=0.9)
        engine.drain()
        if offloading:
            offload.check_idle(engine)
        return {
            name: (engine.outputs[rid], engine.finished[rid], logprobs.get(rid)) for name, rid in rids.items()
        }


@contextlib.contextmanager
def recorded_logprobs(engine):
    """While open, fills a dict: by rid all values and ids of logprobs, in the order in which they were sent."""
    send, seen = engine._sink.send_output, {}

    def recording(output, recv_obj=None):
        if isinstance(output, BatchTokenIDOutput):
            for field, values in vars(output).items():
                if "logprobs" in field and values:
                    for rid, value in zip(output.rids, values):
                        if value:
                            seen.setdefault(rid, []).append((field, value))
        send(output, recv_obj)

    with mock.patch.object(engine._sink, "send_output", recording):
        yield seen


@pytest.mark.parametrize("overlap, retract", [(False, False), (True, True)], ids=["normal", "overlap, retracted"])
def test_options(tiny_model, overlap, retract):
    wanted = serve(tiny_model, False, overlap, retract)
    assert {name: len(tokens) for name, (tokens, _, _) in wanted.items() if len(tokens) < NEW_TOKENS} == {
        "stop token": 21,
        "stop string": 17,
        "grammar": 31,
    }
    assert len(wanted["logprobs"][2]) > NEW_TOKENS
    distinct = [tuple(wanted[name][0]) for name in ("plain", "grammar", "penalties", "least tokens", "bias", "sampled")]
    assert len(set(distinct)) == len(distinct), "an option changed nothing"
    got = serve(tiny_model, True, overlap, retract)
    assert [name for name in wanted if got[name] != wanted[name]] == []


@contextlib.contextmanager
def radix_cache_with_the_fake_transfer():
    """SGLang allows a decode node's radix cache with real transfers, and keeps nothing of a fake one."""
    check = ServerArgs._handle_pd_disaggregation

    def lenient(args):
        backend, args.disaggregation_transfer_backend = args.disaggregation_transfer_backend, "mooncake"
        check(args)
        args.disaggregation_transfer_backend = backend

    with (
        mock.patch.object(ServerArgs, "_handle_pd_disaggregation", lenient),
        mock.patch("sglang.srt.managers.schedule_batch.FAKE_BOOTSTRAP_HOST", None),
    ):
        yield


def sample_copies(tiny_model, offloading, overlap):
    """Answers of four copies of a prompt, one of them retracted, and to a prompt that goes on from one of them."""
    on = offload.offload_args() if offloading else {}
    settings = {**offload.server_args(), **on, "disaggregation_decode_enable_radix_cache": True}
    with contextlib.ExitStack() as stack:
        stack.enter_context(radix_cache_with_the_fake_transfer())
        delivery = stack.enter_context(Delivery())
        engine = stack.enter_context(InprocScheduler(tiny_model, overlap=overlap, **decode_node(**settings)))
        delivery.engine = engine
        # As SGLang's tokenizer does for n above 1: the prompt first, for nothing but its place in the cache.
        engine.run([PROMPT], 0, **delivery.place(0))
        biases = [{}, {"5": 8.0}, {"6": 8.0}, {"7": 8.0}]
        rids = [
            engine.submit(PROMPT, COPY_TOKENS, logit_bias=bias, frequency_penalty=-0.5, **delivery.place(0))
            for bias in biases
        ]
        engine.step_until(lambda: all(len(engine.outputs[rid]) > 3 for rid in rids))
        slots = [engine.slots(rid) for rid in rids]
        assert all(torch.equal(slots[0][:256], other[:256]) for other in slots), "copies share whole pages"
        assert len({int(other[-1]) for other in slots}) == len(slots)
        engine.retract(1)
        engine.drain()
        answers = [engine.outputs[rid] for rid in rids]
        answers += engine.run([PROMPT + answers[0]], COPY_TOKENS, **delivery.place(0))
        engine.idle_checks()
        if offloading:
            assert offload.coordinator(engine).lru.counters[:, 2].sum() > 0
            offload.coordinator(engine).check_idle()
        return answers


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_copies_of_a_prompt_on_a_decode_node(tiny_model, overlap):
    wanted = sample_copies(tiny_model, False, overlap)
    assert len({tuple(tokens) for tokens in wanted[:4]}) == 4
    assert sample_copies(tiny_model, True, overlap) == wanted
