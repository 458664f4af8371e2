"""Tiny configurations of models that keep a latent in place of keys and values (MLA). See ``rows_dense``."""

from typing import Any

from rows_moe import ROUTED_EXPERTS
from tiny_common import WINDOW, text_config

LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DEEPSEEK = {**ROUTED_EXPERTS, **LATENT, "attention_bias": False}
# The indexer keeps the 12 best keys of each query.
INDEXER = {"index_head_dim": 16, "index_n_heads": 4, "index_topk": 12}
LONGCAT = {
    **LATENT,
    "num_layers": 2,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "ffn_hidden_size": 128,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

LATENT_ROWS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**DEEPSEEK, "topk_method": "group_limited_greedy", "rope_scaling": YARN},
    "deepseek_v3": {**DEEPSEEK, "rope_scaling": YARN},
    "deepseek_v32": {**DEEPSEEK, **INDEXER},
    # A window; groups of four tokens compressed into one, and an indexer over those; the last layer
    # uses what the one before keeps.
    "deepseek_v41": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 1, 4, 4],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 2,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 2,
        "rms_norm_eps": 1e-6,
    },
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": {
        **DEEPSEEK,
        **INDEXER,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "kimi_k25": text_config("deepseek_v3", DEEPSEEK),
    "kimi_vl": text_config("deepseek_v3", DEEPSEEK),
    "longcat_flash": LONGCAT,
    # Embeddings depend on the three tokens before.
    "longcat_flash_ngram": {
        **LONGCAT,
        "ngram_vocab_size_ratio": 4,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    # Keys and values for all heads are kept: 32 and 16 dimensions, which the kernels know.
    "minicpm3": {
        **LATENT,
        "qk_rope_head_dim": 16,
        "num_key_value_heads": 4,
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 4.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [4.0] * 8,
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral4": {
        **DEEPSEEK,
        "head_dim": None,
        "rope_parameters": {
            **YARN,
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "youtu_llm": LATENT,
}
