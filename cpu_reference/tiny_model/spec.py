"""What a tiny checkpoint is made of."""

import dataclasses
import hashlib
import json

FORMAT = 1
"""Raised whenever the same spec would give other weights."""

INDEX_DIM = 128
KV_LORA_RANK = 512
QK_NOPE_DIM = 128
QK_ROPE_DIM = 64
V_DIM = 128
LATENT_DIM = KV_LORA_RANK + QK_ROPE_DIM


@dataclasses.dataclass(frozen=True)
class TinySpec:
    """Sizes and weight gains. MLA and indexer widths are the real model's; only depth, heads and width shrink.

    A gain multiplies random weights of unit output scale. How the gains serve: see `tiny_model.weights`.

    ``drafts`` is the share of the vocabulary whose successor is fixed and known to a NextN layer, so that its drafts are
    accepted sometimes and refused sometimes; 0 for a checkpoint without such a layer.
    """

    seed: int = 0
    layers: int = 3
    topk: int = 64
    heads: int = 8
    index_heads: int = 8
    hidden: int = 256
    vocab: int = 2048
    experts: int = 16
    q_lora_rank: int = 256
    max_position: int = 16384
    query_gain: float = 1.5
    value_gain: float = 1.5
    attention_gain: float = 1.0
    last_attention_gain: float = 16.0
    mlp_gain: float = 1.0
    last_mlp_gain: float = 30.0
    drafts: float = 0.0

    @property
    def stamp(self) -> str:
        """Names the checkpoint's contents: equal stamps, equal bytes."""
        text = json.dumps([FORMAT, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def hf_config(self) -> dict:
        """The checkpoint's ``config.json``."""
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "moe_intermediate_size": self.hidden // 2,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": KV_LORA_RANK,
            "qk_rope_head_dim": QK_ROPE_DIM,
            "qk_nope_head_dim": QK_NOPE_DIM,
            "v_head_dim": V_DIM,
            "index_head_dim": INDEX_DIM,
            "index_n_heads": self.index_heads,
            "index_topk": self.topk,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "ep_size": 1,
            "num_nextn_predict_layers": 1 if self.drafts else 0,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
