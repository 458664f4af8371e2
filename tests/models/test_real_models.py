"""Gemma-3-270M and Qwen2.5-Coder-0.5B answer as mlx-lm alone does with the same weights.

Run before a release: ``pytest -m real_model``. Fetches 716 MB once, and needs 4 GB of memory.
"""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models.real_models import GEMMA, QWEN
from oracle import Oracle, assert_matches, greedy

from mlx_paged_attention import LLM
from mlx_paged_attention.models.gguf import config_from_gguf
from mlx_paged_attention.models.gguf_header import read_gguf_header
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import ModelSource

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1800)]

TOLERANCE = 1e-3
OUTPUTS = 8
MODELS = {"gemma": GEMMA, "qwen": QWEN}
# Each a token of both vocabularies; "_" is the space that begins a word.
QUESTION = [
    "The",
    "_capital",
    "_of",
    "_Italy",
    "_is",
    "_Rome",
    ".",
    "_The",
    "_capital",
    "_of",
    "_France",
    "_is",
]
GEMMA_WINDOW = 512


@pytest.fixture(scope="module", params=MODELS)
def real(request):
    """A model's file, the engine on it, mlx-lm on the same arrays, and prompts."""
    path = MODELS[request.param].fetch()
    header = read_gguf_header(path)
    ids = {token: number for number, token in enumerate(header.metadata["tokenizer.ggml.tokens"])}
    start = [header.metadata["tokenizer.ggml.bos_token_id"]] if request.param == "gemma" else []
    space = "▁" if start else "Ġ"
    words = [ids[word.replace("_", space)] for word in QUESTION]
    loaded = load_model(ModelSource("gguf", path, request.param), dtype="auto", device="cpu")

    def prompt(length, seed=0):
        """Words, then tokens that differ between positions and seeds, then words."""
        middle = [300 + (i * i + 17 * seed) % 4000 for i in range(length)]
        return [*start, *words[:6], *middle[: max(0, length - len(start) - 12)], *words[-6:]][:length]

    with LLM(str(path), skip_tokenizer_init=True, num_blocks=256, max_model_len=1024) as llm:
        yield SimpleNamespace(
            name=request.param,
            path=path,
            header=header,
            paris=ids[f"{space}Paris"],
            loaded=loaded,
            llm=llm,
            oracle=Oracle.with_weights_of(loaded.model, loaded.config),
            prompt=prompt,
            question=[*start, *words],
        )


def largest_difference(output, reference):
    """Between the log-probabilities that the engine reported and the reference's; until texts part."""
    assert_matches(output, reference, TOLERANCE)
    differences = [0.0]
    for number, token in enumerate(output.token_ids):
        row = reference.logprobs[number]
        differences += [abs(entry.logprob - row[i]) for i, entry in output.logprobs[number].items()]
        if token != reference.token_ids[number]:
            break
    return max(differences)


def check(real, outputs, num_tokens, what):
    differences = [
        largest_difference(output.outputs[0], real.oracle.greedy(output.prompt_token_ids, num_tokens))
        for output in outputs
    ]
    print(f"{real.name}, {what}: log-probabilities within {max(differences):.1e}")


def test_the_capital_of_france_is_paris(real):
    (output,) = real.llm.generate([real.question], greedy(OUTPUTS, ignore_eos=True))
    check(real, [output], OUTPUTS, "a short question")
    assert output.outputs[0].token_ids[0] == real.paris


def test_a_ragged_batch(real):
    prompts = [real.prompt(length, seed) for seed, length in enumerate((1, 16, 33, 130, 7))]
    together = real.llm.generate(prompts, greedy(OUTPUTS, ignore_eos=True, cache_salt="ragged"))
    check(real, together, OUTPUTS, "a ragged batch")


def test_beyond_the_window(real):
    """Prompts that end before, at and after Gemma's window, and one that crosses it while it decodes."""
    lengths = (GEMMA_WINDOW - 4, GEMMA_WINDOW, GEMMA_WINDOW + 88)
    prompts = [real.prompt(length, seed) for seed, length in enumerate(lengths)]
    outputs = real.llm.generate(prompts, greedy(OUTPUTS, ignore_eos=True, cache_salt="window"))
    check(real, outputs, OUTPUTS, "beyond the window, together")
    (again,) = real.llm.generate(prompts[2:], greedy(OUTPUTS, ignore_eos=True, cache_salt="window"))
    assert again.num_cached_tokens > GEMMA_WINDOW
    check(real, [again], OUTPUTS, "beyond the window, a prefix hit")
    outputs = real.llm.generate(prompts[2:], greedy(OUTPUTS, ignore_eos=True, cache_salt="alone"))
    check(real, outputs, OUTPUTS, "beyond the window, alone")


def test_the_window_matters(real):
    """What makes the test above sharp: without its window Gemma would answer otherwise."""
    if real.name != "gemma":
        pytest.skip("Qwen has no window")
    assert real.loaded.config["sliding_window"] == GEMMA_WINDOW
    wide = Oracle.with_weights_of(real.loaded.model, real.loaded.config | {"sliding_window": 4096})
    prompt = real.prompt(GEMMA_WINDOW + 88, 2)
    one, other = (oracle.greedy(prompt, 1).logprobs[0] for oracle in (real.oracle, wide))
    assert np.abs(one - other).max() > 100 * TOLERANCE


def test_chunks_beside_decoding_rows(real):
    prompts = [real.prompt(length, seed) for seed, length in enumerate((5, 90, 40))]
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 3, "num_blocks": 64, "max_model_len": 256}
    with LLM(str(real.path), skip_tokenizer_init=True, block_size=8, **options) as llm:
        outputs = llm.generate(prompts, greedy(OUTPUTS, ignore_eos=True))
    check(real, outputs, OUTPUTS, "chunks")


def test_every_tensor_equals_the_gguf_package(real):
    parameters = dict(tree_flatten(real.loaded.model.parameters()))
    config = config_from_gguf(real.header)
    layers = config["num_hidden_layers"]
    short = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(real.path).tensors}
    for number in range(layers):
        for name, stem in short.items():
            tensor = reference[f"blk.{number}.{stem}.weight"]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            got = np.array(parameters[f"model.layers.{number}.{name}.weight"])
            np.testing.assert_array_equal(got, expected)
