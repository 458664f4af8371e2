"""Tiny configurations of models with convolutions or recurrent states, most of them beside attention.

See ``rows_dense``.
"""

from typing import Any

from rows_dense import GRANITE
from rows_latent import LATENT
from rows_moe import EXPERTS, LOCAL_EXPERTS
from tiny_common import FULL, LINEAR, SLIDING, WINDOW, text_config

CONV = "conv"
BAILING = {
    **EXPERTS,
    "num_hidden_layers": 4,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "score_function": "sigmoid",
    "use_qk_norm": True,
}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
QWEN35 = {
    **GATED_DELTA,
    "rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
SHARED_EXPERT = {**EXPERTS, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 32}
KIMI_LINEAR = {
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 2, 3],  # counted from 1
    "full_attn_layers": [4],
}
KIMI = {
    **LATENT,
    "num_hidden_layers": 4,
    "linear_attn_config": KIMI_LINEAR,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LFM2 = {
    "num_hidden_layers": 3,
    "layer_types": [CONV, FULL, CONV],
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

RECURRENT: dict[str, dict[str, Any]] = {
    # Keys and values of each layer go through a convolution of two tokens first.
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0], "conv_window": 2},
    "bailing_hybrid": {**BAILING, **LATENT},
    "bailing_moe_linear": BAILING,
    "bailing_moe_v3": {
        **BAILING,
        **LATENT,
        "moe_shared_expert_intermediate_size": 32,
        "architectures": ["BailingMoeV3ForCausalLM"],
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128, "lm_head_multiplier": 1.0},
    "gear": {
        "num_hidden_layers": 3,
        "layer_types": ["conv_mixer", SLIDING, FULL],
        "sliding_window": WINDOW,
    },
    "granitemoehybrid": {
        **GRANITE,
        **LOCAL_EXPERTS,
        **MAMBA2,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_k3": text_config("kimi_linear", {**KIMI, "attn_res_block_size": 2}),
    "kimi_linear": {**KIMI, "model_max_length": 512},
    "lfm2": LFM2,
    "lfm2-vl": text_config("lfm2", LFM2),
    "lfm2_moe": {**LFM2, **EXPERTS, "num_dense_layers": 1, "use_expert_bias": True},
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        "num_heads": 8,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
    },
    "nemotron_h": {
        **EXPERTS,
        "hybrid_override_pattern": ["M", "*", "E", "-", "M"],
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "olmo_hybrid": {
        **GATED_DELTA,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
    },
    "plamo2": {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "attention_window_size": WINDOW,
        "full_attention_idx": [3],
        "mamba_d_state": 16,
        "mamba_num_heads": 8,
    },
    "prism_hadamard_qwen35": {
        **text_config("qwen3_5_text", {**QWEN35, "hidden_size": 128}),
        # Two layers whose weights are packed, beside plain ones.
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.embed_tokens", "embedding": True, "dtype": "float16", "block": 0},
            {"path": "model.layers.0.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0},
        ],
    },
    "qwen3_5": text_config("qwen3_5_text", QWEN35),
    "qwen3_5_moe": text_config("qwen3_5_moe_text", {**QWEN35, **SHARED_EXPERT}),
    "qwen3_next": {**GATED_DELTA, **SHARED_EXPERT, "mlp_only_layers": [0]},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "num_key_value_heads": 1,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}
