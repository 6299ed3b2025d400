"""Requests with and without token_ids_logprob in one batch: each gets what it asked for."""

import unittest

import torch
from harness import environment, offload
from harness.scheduler import InprocScheduler
from tiny_model import TinySpec, write_checkpoint

from sglang.srt.layers.utils.logprob import LogprobStage, get_token_ids_logprobs_raw
from sglang.test.test_utils import CustomTestCase

PROMPTS = offload.prompts([40, 70])
WITH_LOGPROBS = {"return_logprob": True, "token_ids_logprob": [1, 2, 3]}


class TestTokenIdsLogprobs(CustomTestCase):
    def test_requests_of_both_kinds_in_a_batch(self):
        model = environment.MODELS / "tiny"
        write_checkpoint(model, TinySpec())
        for overlap in (False, True):
            with self.subTest(overlap=overlap), InprocScheduler(model, overlap=overlap, **offload.server_args()) as engine:
                alone = engine.run(PROMPTS, 6)
                rids = [engine.submit(ids, 6, **more) for ids, more in zip(PROMPTS, (WITH_LOGPROBS, {}))]
                engine.drain()
                self.assertEqual([engine.outputs[rid] for rid in rids], alone)

    def test_rows_of_prompts(self):
        logprobs = torch.arange(35.0).view(7, 5)
        lengths, asked = [2, 3, 0, 2], [[1], None, [2], [0, 4]]
        wanted = [[[1.0], [6.0]], [], [], [[25.0, 29.0], [30.0, 34.0]]]
        for no_copy in (False, True):
            values, ids = get_token_ids_logprobs_raw(logprobs, asked, LogprobStage.PREFILL, lengths, no_copy)
            self.assertEqual([v.tolist() for v in values] if no_copy else values, wanted)
            self.assertEqual(ids, [[[1], [1]], [], [], [[0, 4], [0, 4]]])


if __name__ == "__main__":
    unittest.main()
