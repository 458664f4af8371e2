"""Every model file of mlx-lm, on the engine: what it says is what mlx-lm alone says, or it is refused.

``docs/models.md`` has what is expected of each file; ``models_table.py`` writes it.
"""

import contextlib
import dataclasses
import importlib.util

import mlx.core as mx
import pytest
from engine_hooks import poison_free_blocks
from models_table import PATH, committed_rows, load, page, row
from parity_case import (
    BLOCK_SIZE,
    FEATURES,
    ParityCase,
    beyond_the_check_at_load,
    check,
    with_far_thresholds,
)
from tiny_common import WINDOW
from tiny_configs import KNOWN_WRONG, TINY, tiny_row
from tiny_models import write_model

from mlx_paged_attention.errors import RequestFailedError, UnsupportedModelError

ROWS = committed_rows()
REFUSED = [name for name in TINY if "| refused |" in ROWS.get(name, "")]
EXACT = [name for name in TINY if name not in REFUSED and name not in KNOWN_WRONG]
FAR = [name for name in EXACT if with_far_thresholds(TINY[name]) != TINY[name]]

as_committed = pytest.mark.skipif(
    mx.metal.is_available() or mx.cuda.is_available() or importlib.util.find_spec("numba") is None,
    reason="the table is made on a CPU, with compiled loops",
)


@pytest.fixture(scope="module", autouse=True)
def _optional_packages(stub_packages):
    """OLMo's file imports a package that it does not use."""


@pytest.fixture(scope="module")
def loaded(request, tmp_path_factory):
    """The tiny model ``request.param`` on the engine, or the error with which it is refused."""
    case, error = load(request.param, tmp_path_factory.mktemp("model"))
    yield request.param, case, error
    if case is not None:
        case.close()


@pytest.fixture(scope="module")
def case(loaded):
    name, case, error = loaded
    assert case is not None, f"{name} is refused now: {error}"
    return case


@as_committed
@pytest.mark.parametrize("loaded", TINY, indirect=True)
def test_a_model_runs_as_the_committed_table_says(loaded):
    name, case, error = loaded
    assert row(name, case, error) == ROWS.get(name), "run models_table.py, and look at what changed"


@as_committed
def test_the_committed_table_is_whole():
    assert PATH.read_text() == page([ROWS[name] for name in TINY])


@pytest.mark.parametrize("loaded", REFUSED, indirect=True)
def test_a_refusal_names_its_reason_in_one_error(loaded):
    _, _, error = loaded
    assert isinstance(error, UnsupportedModelError)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
@pytest.mark.parametrize("loaded", EXACT, indirect=True)
def test_what_the_engine_says_is_what_mlx_lm_says(case, feature):
    check(case, feature)


@pytest.mark.parametrize("loaded", KNOWN_WRONG, indirect=True)
def test_what_is_known_to_be_wrong_still_is(case):
    """If this fails, it has been mended: take the model out of ``KNOWN_WRONG``."""
    exact = 0
    for feature in FEATURES:
        with contextlib.suppress(AssertionError, RequestFailedError):
            check(case, feature)
            exact += 1
    assert exact < len(FEATURES)


@pytest.mark.parametrize("loaded", EXACT, indirect=True)
def test_the_pool_is_as_large_as_the_bytes_per_token_say(case):
    info = case.llm.info
    # A block holds what the layers of one group keep of its tokens.
    per_block = BLOCK_SIZE * info.bytes_per_token // len(info.windows)
    assert info.pool_bytes == info.num_blocks * per_block


@pytest.mark.parametrize("loaded", ["gemma3n"], indirect=True)
def test_what_lies_behind_windows_is_freed_where_layers_use_the_keys_of_others(case):
    windows = case.llm.info.windows
    assert None in windows
    assert WINDOW in windows
    for feature in FEATURES:
        poison_free_blocks(case.llm)
        check(case, feature)


def far_row(name):
    tiny = tiny_row(name)
    return dataclasses.replace(tiny, config=with_far_thresholds(tiny.config))


@pytest.mark.parametrize("name", FAR)
def test_windows_and_switch_points_beyond_the_check_at_load(name, tmp_path):
    case = ParityCase(write_model(far_row(name), tmp_path / name))
    try:
        check(case, beyond_the_check_at_load)
    finally:
        case.close()


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", EXACT)
def test_every_feature_with_other_block_sizes(name, block_size, tmp_path):
    options = {"block_size": block_size, "num_blocks": 96 * BLOCK_SIZE // block_size}
    case = ParityCase(write_model(tiny_row(name), tmp_path / name), **options)
    try:
        for feature in FEATURES:
            if feature.__name__ == "prefix_hit" and block_size > BLOCK_SIZE:
                continue
            check(case, feature)
    finally:
        case.close()
