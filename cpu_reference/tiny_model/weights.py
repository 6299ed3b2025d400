"""Random weights, made so that one wrong KV row shows in the greedy output.

What makes a row visible:

* Attention is flat (``query_gain`` is low), so each of the top-k rows carries about 1/k of the output; sharp attention
  would leave most rows without weight.
* Attention outweighs the residual stream, most of all in the last layer (``last_attention_gain``): there a row reaches
  the logits only through that step's output, since no later layer keeps it.
"""

import dataclasses
from typing import Dict

import torch

from tiny_model.spec import INDEX_DIM, KV_LORA_RANK, LATENT_DIM, QK_NOPE_DIM, QK_ROPE_DIM, V_DIM, TinySpec

CERTAIN_GAIN = 60.0
CERTAIN_LOGIT = 12.0
NEXTN_GAIN = 0.2


class _Maker:
    """Draws named tensors from one generator, always in the same order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: Dict[str, torch.Tensor] = {}

    def linear(self, name: str, out_dim: int, in_dim: int, gain: float = 1.0) -> None:
        weight = torch.randn(out_dim, in_dim, generator=self.generator)
        self.tensors[f"{name}.weight"] = (weight * gain * in_dim**-0.5).to(torch.bfloat16)

    def ones(self, name: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(dim, dtype=dtype)

    def zeros(self, name: str, dim: int) -> None:
        self.tensors[name] = torch.zeros(dim)


def make_weights(spec: TinySpec) -> Dict[str, torch.Tensor]:
    """All tensors of the checkpoint under their Hugging Face names; bf16, except the indexer's norm and gate bias."""
    maker = _Maker(spec.seed)
    embed = torch.randn(spec.vocab, spec.hidden, generator=maker.generator)
    maker.tensors["model.embed_tokens.weight"] = embed.to(torch.bfloat16)
    for layer in range(spec.layers):
        _attention(maker, spec, layer)
        _mlp(maker, spec, layer)
    maker.ones("model.norm", spec.hidden)
    maker.linear("lm_head", spec.vocab, spec.hidden)
    if spec.drafts:
        _fix_successors(maker, spec)
        _nextn(maker, spec)
    return maker.tensors


def _fix_successors(maker: _Maker, spec: TinySpec) -> None:
    """Give some tokens an embedding that outweighs all layers, and the output a fixed choice after it."""
    embed, head = maker.tensors["model.embed_tokens.weight"], maker.tensors["lm_head.weight"]
    tokens = 3 + torch.randperm(spec.vocab - 3, generator=maker.generator)  # not begin, end and unknown
    certain = tokens[: int(spec.drafts * spec.vocab)]
    successors = tokens[torch.randperm(len(tokens), generator=maker.generator)[: len(certain)]]
    head[successors] += (CERTAIN_LOGIT / spec.hidden * embed[certain].float()).to(torch.bfloat16)
    embed[certain] *= CERTAIN_GAIN


def _nextn(maker: _Maker, spec: TinySpec) -> None:
    """The layer that drafts: it hands the token's embedding to the output, with little added."""
    quiet = dataclasses.replace(
        spec, attention_gain=NEXTN_GAIN, last_attention_gain=NEXTN_GAIN, mlp_gain=NEXTN_GAIN, last_mlp_gain=NEXTN_GAIN
    )
    _attention(maker, quiet, spec.layers)
    _mlp(maker, quiet, spec.layers)
    block = f"model.layers.{spec.layers}"
    eye = torch.eye(spec.hidden, dtype=torch.bfloat16)
    maker.tensors[f"{block}.eh_proj.weight"] = torch.cat([eye, NEXTN_GAIN * eye], 1)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        maker.ones(f"{block}.{norm}", spec.hidden)


def _attention(maker: _Maker, spec: TinySpec, layer: int) -> None:
    block = f"model.layers.{layer}"
    attn = f"{block}.self_attn"
    last = layer == spec.layers - 1
    maker.ones(f"{block}.input_layernorm", spec.hidden)
    maker.linear(f"{attn}.q_a_proj", spec.q_lora_rank, spec.hidden)
    maker.ones(f"{attn}.q_a_layernorm", spec.q_lora_rank)
    maker.linear(f"{attn}.q_b_proj", spec.heads * (QK_NOPE_DIM + QK_ROPE_DIM), spec.q_lora_rank, spec.query_gain)
    maker.linear(f"{attn}.kv_a_proj_with_mqa", LATENT_DIM, spec.hidden)
    maker.ones(f"{attn}.kv_a_layernorm", KV_LORA_RANK)
    maker.linear(f"{attn}.kv_b_proj", spec.heads * (QK_NOPE_DIM + V_DIM), KV_LORA_RANK, spec.value_gain)
    gain = spec.last_attention_gain if last else spec.attention_gain
    maker.linear(f"{attn}.o_proj", spec.hidden, spec.heads * V_DIM, gain)
    maker.linear(f"{attn}.indexer.wq_b", spec.index_heads * INDEX_DIM, spec.q_lora_rank)
    maker.linear(f"{attn}.indexer.wk", INDEX_DIM, spec.hidden)
    maker.ones(f"{attn}.indexer.k_norm", INDEX_DIM, torch.float32)
    maker.zeros(f"{attn}.indexer.k_norm.bias", INDEX_DIM)
    maker.linear(f"{attn}.indexer.weights_proj", spec.index_heads, spec.hidden)


def _mlp(maker: _Maker, spec: TinySpec, layer: int) -> None:
    block = f"model.layers.{layer}"
    maker.ones(f"{block}.post_attention_layernorm", spec.hidden)
    gain = spec.last_mlp_gain if layer == spec.layers - 1 else spec.mlp_gain

    def gated(name: str, width: int) -> None:
        maker.linear(f"{name}.gate_proj", width, spec.hidden)
        maker.linear(f"{name}.up_proj", width, spec.hidden)
        maker.linear(f"{name}.down_proj", spec.hidden, width, gain)

    if layer == 0:
        gated(f"{block}.mlp", 2 * spec.hidden)
        return
    maker.linear(f"{block}.mlp.gate", spec.experts, spec.hidden)
    maker.zeros(f"{block}.mlp.gate.e_score_correction_bias", spec.experts)
    for expert in range(spec.experts):
        gated(f"{block}.mlp.experts.{expert}", spec.hidden // 2)
    gated(f"{block}.mlp.shared_experts", spec.hidden // 2)
