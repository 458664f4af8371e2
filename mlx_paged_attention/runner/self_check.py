"""At load, every model proves which way of running a step computes what mlx-lm computes.

Ragged sequences go through mlx-lm's own cache, one alone, and through each layout in chunks and
mixed steps on shuffled blocks; the first layout whose logits agree is the one that is used.
Nothing is inferred from names, so a model that no layout runs exactly is refused, not approximated.
"""

import random
from collections.abc import Iterator
from itertools import chain

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from mlx_paged_attention.errors import UnsupportedModelError
from mlx_paged_attention.models.cache_spec import ModelCacheSpec, not_run_by_mlx_lm
from mlx_paged_attention.runner.grouping import choose_groups
from mlx_paged_attention.runner.kv_pool import KernelPool, make_pool
from mlx_paged_attention.runner.layout import LAYOUTS, Layout
from mlx_paged_attention.runner.model_host import ModelHost
from mlx_paged_attention.runner.model_runner import ModelRunner
from mlx_paged_attention.sampling.params import RowSampling
from mlx_paged_attention.scheduler.step_plan import NewRow, PlannedRow, StepPlan

# Tokens each sequence computes in each step: chunks first, then a mixed step, then decode.
# The second and third share forwards when one knows a single token and the other many.
_STEPS = ((6, 1, 9, 4), (11, 1, 1, 3), (1, 1, 1, 40), (1, 1, 1, 1), (1, 1, 1, 1))

# Largest |difference| of logits, in standard deviations of the reference's. Wrong positions or a
# wrong mask move them by about 3; rounding in a half-precision type by a few hundredths.
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}


def choose_layout(host: ModelHost, spec: ModelCacheSpec, *, vocab_size: int, on_host: bool) -> Layout:
    """The fastest layout that is exact for this model.

    Raises:
        UnsupportedModelError: no layout is; the message has each one's error.
    """
    lengths = np.sum(_STEPS, axis=0)
    prompts = [
        [(37 * i * i + 101 * i + 11 * s + 3) % vocab_size for i in range(length)]
        for s, length in enumerate(lengths)
    ]
    try:
        references = [mlx_lm_logits(host.model, prompt) for prompt in prompts]
    except Exception as exception:  # whatever model code raises: nothing of ours is in its way
        raise not_run_by_mlx_lm(exception) from exception
    if not all(np.isfinite(reference).all() for reference in references):
        raise UnsupportedModelError(
            "mlx_lm itself computes no finite numbers with this model: its weights, or an adapter, are bad"
        )
    tolerance = TOLERANCE[spec.dtype]
    failures = []
    for layout in _candidates(spec, on_host=on_host):
        try:
            error = _error(host, spec, layout, prompts, references, on_host=on_host)
        except Exception as exception:  # whatever model code raises is this layout's verdict
            failures.append(f"{layout.name}: {type(exception).__name__}: {exception}")
            continue
        if error <= tolerance:
            return layout
        failures.append(f"{layout.name}: off by {error:.2g} standard deviations")
    raise UnsupportedModelError(
        "the model does not compute on the paged cache what it computes in mlx_lm "
        f"({'; '.join(failures)}); use mlx_lm for it"
    )


def _candidates(spec: ModelCacheSpec, *, on_host: bool) -> Iterator[Layout]:
    compiles = not spec.states and isinstance(make_pool(spec, 1, host=on_host), KernelPool)
    for layout in LAYOUTS:
        if spec.own_masks and not layout.dense:
            continue  # only the model itself knows its mask
        if spec.states and layout.pack:
            continue  # a row is not a sequence there
        if spec.latents and layout.pack:
            continue  # a run of tokens makes keys and values of the latents, once for all
        if compiles and not layout.dense:
            yield layout.with_compiled_steps()
        yield layout


def mlx_lm_logits(model: nn.Module, tokens: list[int]) -> NDArray[np.float32]:
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))
    return np.array(logits[0].astype(mx.float32))


def _error(
    host: ModelHost,
    spec: ModelCacheSpec,
    layout: Layout,
    prompts: list[list[int]],
    references: list[NDArray[np.float32]],
    *,
    on_host: bool,
) -> float:
    block_size = spec.block_size
    groups = choose_groups(spec, layout).groups
    needed = [-(-len(prompt) // block_size) * len(groups) for prompt in prompts]
    ids = list(range(1, 1 + sum(needed)))
    random.Random(0).shuffle(ids)
    runner = ModelRunner(host, spec, make_pool(spec, 1 + sum(needed), host=on_host, groups=groups), layout)
    names = [str(i) for i in range(len(prompts))]
    done = [0] * len(prompts)
    worst = 0.0
    for step, counts in enumerate(_STEPS):
        new = [
            NewRow(name, prompt, len(prompt), RowSampling(temperature=0.0))
            for name, prompt in zip(names, prompts, strict=True)
            if step == 0
        ]
        rows = []
        for i, count in enumerate(counts):
            blocks, ids = (ids[: needed[i]], ids[needed[i] :]) if step == 0 else ([], ids)
            tokens = prompts[i][done[i] : done[i] + count]
            slots = (i + 1 if step else 0, i + 1)
            rows.append(PlannedRow(names[i], tokens, done[i], blocks, done[i], True, *slots))
            done[i] += count
        for row, logits in chain.from_iterable(runner.forward(StepPlan(step, new, rows, []))):
            assert logits is not None
            reference = references[int(row.request_id)][row.start + len(row.token_ids) - 1]
            ours = np.array(logits[-1].astype(mx.float32))
            difference = float(np.abs(ours - reference).max() / max(reference.std(), 1e-6))
            worst = max(worst, difference if np.isfinite(difference) else np.inf)
    return worst
