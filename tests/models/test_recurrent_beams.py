"""Beams of models that keep states, which cannot part at any token, are those of the plain search."""

import pytest
from oracle import Oracle, varied_prompt
from plain_search import PlainSearch, assert_found, beam_params
from tiny_configs import tiny_row
from tiny_models import write_model

from mlx_paged_attention import LLM

PROMPTS = [varied_prompt(length, seed) for seed, length in enumerate((29, 16, 5))]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba2"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="cached"),
        pytest.param({"enable_prefix_caching": False}, id="uncached"),
        pytest.param({"num_blocks": 16, "max_num_seqs": 5, "max_num_batched_tokens": 16}, id="few_blocks"),
    ],
)
def test_beams_with_recurrent_layers_are_those_of_the_plain_search(name, options, tmp_path):
    directory = write_model(tiny_row(name), tmp_path / name)
    search = PlainSearch(Oracle.load(directory).model)
    options = {"block_size": 8, "num_blocks": 96, "max_num_seqs": 8, "max_model_len": 64, **options}
    llm = LLM(model=str(directory), skip_tokenizer_init=True, **options)
    try:
        outputs = llm.generate(PROMPTS, beam_params(n=3, max_tokens=12), use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_found(output, search.run(prompt, 3, 12), 3)
        assert llm.stats().used_blocks == 0
    finally:
        llm.close()
