"""Every model file of mlx-lm has a tiny row, which runs in mlx-lm alone and shows what goes wrong."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from oracle import Oracle, varied_prompt
from tiny_configs import NEEDS_METAL, NO_REFERENCE, NOT_MODELS, TINY, model_files, tiny_row
from tiny_models import build_model

COMPARABLE = [name for name in TINY if name not in NO_REFERENCE and name not in NEEDS_METAL]
PROMPT = varied_prompt(60, 1)


@pytest.fixture(scope="module", autouse=True)
def _optional_packages(stub_packages):
    """OLMo's file imports a package that it does not use."""


@pytest.fixture(scope="module", params=COMPARABLE)
def oracle(request):
    return Oracle(build_model(tiny_row(request.param))[0])


@pytest.fixture(scope="module")
def right(oracle):
    """``[tokens, vocab]`` log-probabilities of ``PROMPT``, computed in one forward."""
    return oracle.prompt_logprobs(PROMPT)


def in_chunks(oracle, sizes):
    """``[tokens, vocab]`` log-probabilities of ``PROMPT``, computed in chunks of ``sizes`` tokens."""
    cache = make_prompt_cache(oracle.model)
    rows, start = [], 0
    for size in sizes:
        rows.append(np.array(oracle.model(mx.array([PROMPT[start : start + size]]), cache=cache)[0]))
        start += size
    assert start == len(PROMPT)
    logits = np.concatenate(rows)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def moved_by(oracle, right, prompt):
    """How far another prompt moves the log-probabilities after its last token."""
    return np.abs(oracle.prompt_logprobs(prompt)[-1] - right[-1]).max()


def noise(right, other):
    """The largest difference between two computations, of the likely tokens."""
    likely = np.argsort(-right, axis=-1)[:, :5]
    return np.abs(np.take_along_axis(other, likely, 1) - np.take_along_axis(right, likely, 1)).max()


def test_every_file_of_mlx_lm_has_a_row_or_a_reason():
    missing = set(model_files()) - set(TINY) - set(NOT_MODELS)
    assert not missing, f"mlx-lm has models without a row in rows_*.py: {sorted(missing)}"
    assert not set(TINY) & set(NOT_MODELS)


def test_a_row_builds_and_its_outputs_vary(right):
    assert np.isfinite(right).all()
    assert right.std() > 0.3
    assert len(set(right.argmax(-1))) >= 16


def test_a_fault_in_an_old_token_would_show(oracle, right):
    changed = [*PROMPT[:3], PROMPT[3] ^ 1, *PROMPT[4:]]
    assert moved_by(oracle, right, changed) > 1e-2, "another token near the start"
    assert moved_by(oracle, right, PROMPT[20:]) > 1e-2, "the first 20 tokens lost"


def test_wrong_positions_would_show(oracle, right):
    swapped = list(PROMPT)
    swapped[-8], swapped[-14] = swapped[-14], swapped[-8]
    assert moved_by(oracle, right, swapped) > 1e-2


def test_mlx_lm_agrees_with_itself_in_chunks_and_in_decoding(oracle, right):
    assert noise(right, in_chunks(oracle, [7] * 8 + [4])) < 5e-5
    assert noise(right, in_chunks(oracle, [40] + [1] * 20)) < 5e-5


@pytest.mark.parametrize("name", ["phi3small", "plamo3"])
def test_mlx_lm_still_contradicts_itself(name):
    """If this fails, mlx-lm has mended it: take the model out of ``NO_REFERENCE``."""
    oracle = Oracle(build_model(tiny_row(name))[0])
    assert noise(oracle.prompt_logprobs(PROMPT), in_chunks(oracle, [40] + [1] * 20)) > 1e-2


def test_mlx_lm_still_cannot_run_olmo():
    with pytest.raises(ValueError, match="inplace addition"):
        Oracle(build_model(tiny_row("olmo"))[0]).prompt_logprobs(PROMPT)
