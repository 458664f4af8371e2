"""Rope scaling of every kind that mlx-lm's Llama has: exact before, across and beyond its switch point."""

import numpy as np
import pytest
from oracle import Oracle, assert_matches, greedy, varied_prompt
from tiny_models import LLAMA3_ROPE, LONGROPE, TinyModel, write_model

from mlx_paged_attention import LLM

ORIGINAL = 32  # positions that the model was made for before scaling
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3_ROPE, "original_max_position_embeddings": ORIGINAL},
    "longrope": LONGROPE,
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn with its own scale": {
        "rope_type": "yarn",
        **YARN,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_answers_before_across_and_beyond_the_switch_point(scaling, tiny_model, tmp_path):
    config = {"model_type": "llama", "rope_scaling": scaling, "max_position_embeddings": 4 * ORIGINAL}
    directory = write_model(TinyModel(config), tmp_path / "scaled")
    oracle = Oracle.load(directory)
    prompts = [varied_prompt(n, seed) for seed, n in enumerate((5, ORIGINAL - 3, ORIGINAL, 100))]
    with LLM(str(directory), skip_tokenizer_init=True, num_blocks=64, max_num_batched_tokens=40) as llm:
        assert llm.info.max_model_len == 4 * ORIGINAL
        for _ in range(2):  # computed, then hit
            for output, prompt in zip(llm.generate(prompts, greedy(12)), prompts, strict=True):
                assert_matches(output.outputs[0], oracle.greedy(prompt, 12))
    if scaling["rope_type"] == "dynamic":  # takes effect beyond the context that the engine allows
        return
    # The weights are those of "llama": only the scaling differs, and it shows.
    plain = Oracle.load(tiny_model("llama")).prompt_logprobs(prompts[3])[-1]
    assert np.abs(oracle.prompt_logprobs(prompts[3])[-1] - plain).max() > 1e-2
