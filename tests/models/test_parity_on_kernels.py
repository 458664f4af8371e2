"""What engines say on the kernels is what mlx-lm says, for models whose layers differ from each other.

Steps are stated as on a GPU; where there is none, the kernels' Metal text runs in the emulator.
"""

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import mlx.core as mx
import pytest
from elastic import resizing_now_and_then
from emulated_kernels import emulated_kernels, skip_without_gpu
from parity_case import ParityCase, chunked_prefill, fork, preemption, prefix_hit, ragged_batch
from tiny_configs import tiny_row
from tiny_models import write_model

from mlx_paged_attention.engine import loading
from mlx_paged_attention.ops import packing

# Windows, and keys shared between layers; layer groups, with and without sinks; a window in
# the mask alone; layers run twice; states; both kinds; latents, beside states, expanded before they are kept.
MODELS = {
    "gemma3_text": "packed rows, compiled",
    "gpt_oss": "packed rows, compiled",
    "gemma4_text": "packed rows, compiled",
    "mistral3": "packed rows, compiled",
    "iquestloopcoder": "packed rows, compiled",
    "jamba": "row layout",
    "falcon_h1": "row layout",
    "deepseek_v3": "row layout, compiled",
    "glm4_moe_lite": "row layout, compiled",
    "mistral4": "row layout, compiled",
    "kimi_linear": "row layout",
    "minicpm3": "packed rows, compiled",
}
FEATURES = (ragged_batch, chunked_prefill, prefix_hit, preemption, fork)


@pytest.fixture(scope="module", params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request) -> Iterator[None]:
    if request.param == "gpu":
        skip_without_gpu()
        yield
        return
    with emulated_kernels(), pytest.MonkeyPatch.context() as patch:
        # As on a machine whose pool is not the host's.
        without = SimpleNamespace(util=SimpleNamespace(find_spec=_all_but_numba))
        patch.setattr(loading, "importlib", without)
        # Tiles of queries, which Metal would take for short runs only.
        patch.setattr(packing, "GATHER_BEYOND", {"cuda": 1000, "metal": 24})
        mx.disable_compile()
        yield
        mx.enable_compile()


def _all_but_numba(name: str):
    return None if name == "numba" else importlib.util.find_spec(name)


@pytest.fixture(scope="module", params=MODELS)
def case(request, kernels, tmp_path_factory) -> Iterator[ParityCase]:
    case = ParityCase(write_model(tiny_row(request.param), tmp_path_factory.mktemp("model")))
    assert case.llm.info.forward == MODELS[request.param]
    yield case
    case.close()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_what_the_engine_says_on_kernels_is_what_mlx_lm_says(case, feature):
    feature(case)


@pytest.mark.parametrize("name", ["gemma4_text", "jamba"])
def test_a_pool_may_grow_and_shrink_meanwhile(kernels, name, tmp_path):
    options = {"num_blocks": None, "kv_memory": 1 << 20, "max_num_batched_tokens": 32}
    case = ParityCase(write_model(tiny_row(name), tmp_path), **options)
    with resizing_now_and_then(case.llm):
        ragged_batch(case)
    stats = case.llm.stats()
    assert stats.pool_growths >= 1
    assert stats.pool_shrinks >= 1
    case.close()
