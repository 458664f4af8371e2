"""Tiny configurations of models with plain attention and dense feed-forward layers.

Each row says what a model's configuration has beside, or instead of, ``tiny_configs.COMMON``.
Windows are of 8 or 16 tokens, so that prompts of a few dozen leave them.
"""

from typing import Any

from tiny_common import FULL, SLIDING, WINDOW, text_config

GPT: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_inner": 128}
GPT["layer_norm_epsilon"] = 1e-5
GRANITE = {
    "logits_scaling": 0.5,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_bias": False,
    "mlp_bias": False,
}
NANO_ATTENTION = {"n_heads_in_group": 2}
GEMMA4_ROPE = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    SLIDING: {"partial_rotary_factor": 1.0, "rope_theta": 1e4, "rope_type": "default"},
}
# Layers 0-3 keep keys and values, 4 and 5 use those of the last layer of their kind.
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "rope_parameters": GEMMA4_ROPE,
    "sliding_window": WINDOW,
}
GEMMA3 = {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 1e4,
    "rope_theta": 1e6,
}
MINISTRAL3 = {
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, FULL],
    "sliding_window": WINDOW,
    # The temperature of attention changes every 16 tokens.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}
# Position 40 is beyond the length that the short factors are for.
SU_ROPE = {"type": "su", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8}

DENSE: dict[str, dict[str, Any]] = {
    # The last two layers attend to the keys and values of the one before.
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "apertus": {"mlp_bias": False, "attention_bias": False, "post_norm": False, "qk_norm": True},
    "bitnet": {},
    "cohere": {"logit_scale": 0.5, "layer_norm_eps": 1e-5},
    "cohere2": {
        "num_hidden_layers": 4,
        "logit_scale": 0.5,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "ernie4_5": {"use_bias": False},
    "exaone": {"num_layers": 2, "layer_norm_epsilon": 1e-5},
    "exaone4": {
        "num_hidden_layers": 3,
        "rope_scaling": None,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLG",
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": text_config("gemma3_text", GEMMA3),
    "gemma3_text": GEMMA3,
    "gemma3n": text_config(
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 256,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    ),
    "gemma4": text_config("gemma4_text", GEMMA4),
    "gemma4_text": {
        # Full layers without values of their own, and experts beside the dense layers.
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm": {},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "gpt2": {**GPT, "n_ctx": 512},
    "gpt_bigcode": GPT,
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": {**GPT, "rotary_dim": 8},
    "granite": GRANITE,
    "helium": {"attention_bias": False, "mlp_bias": False},
    "hunyuan_v1_dense": {
        "rope_scaling": {"alpha": 4.0, "factor": 1.0, "type": "dynamic"},
    },
    "internlm2": {"rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "internlm3": {"rope_scaling": {"factor": 2.0, "rope_type": "dynamic"}},
    # Runs its layers twice; the second time half of attention has a window.
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "lille-130m": {
        "block_size": 512,
        "layer_norm_eps": 1e-5,
        "n_embd": 64,
        "n_head": 4,
        "n_kv_heads": 2,
        "n_layer": 2,
    },
    "llama": {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW},
    "llama4_text": {
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 0],
        "use_qk_norm": True,
    },
    "mimo": {},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4.0},
    "ministral3": MINISTRAL3,
    "mistral3": text_config("ministral3", MINISTRAL3),
    "muse_glimmer": {
        "num_hidden_layers": 4,
        "output_multiplier": 1.0,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    },
    # Runs its layers twice, with keys and values of their own each time.
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    # Layers with heads of their own each, without attention, and with a matrix in its place.
    "nemotron-nas": {
        "num_hidden_layers": 4,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "olmo": {
        "d_model": 64,
        "n_layers": 2,
        "mlp_hidden_size": 128,
        "n_heads": 4,
        "embedding_size": 256,
    },
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": WINDOW},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 8],
        "num_kv_heads": [2, 4],
        "ffn_multipliers": [2.0, 3.0],
    },
    "phi": {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "phi3": {"rope_scaling": SU_ROPE, "original_max_position_embeddings": 32},
    # Every other layer attends to its last block and to some columns of those before.
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
        # It writes to the logits of its special tokens, which exist at any size.
        "vocab_size": 100352,
    },
    "pixtral": text_config("mistral", {}),
    "plamo": {"n_shared_head": 2},
    "plamo3": {"num_hidden_layers": 4, "window_size": WINDOW, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 16, "layer_norm_epsilon": 1e-6, "no_bias": True},
    "qwen2": {},
    "qwen2_vl": text_config("qwen2", {}),
    "qwen3": {},
    "qwen3_vl": text_config("qwen3", {}),
    "seed_oss": {"attention_bias": True},
    "smollm3": {"num_hidden_layers": 4},
    "spark2_5": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    "stablelm": {
        "use_qkv_bias": False,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
        "qk_layernorm": True,
    },
    "starcoder2": {"norm_epsilon": 1e-5},
    "talkie": {},
    "telechat3": {},
}
