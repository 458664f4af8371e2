"""From a configuration to everything an engine runs on. Happens on the thread that owns MLX."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_paged_attention.cache.sizing import check_budget, plan_pool, step_limits, step_tokens
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.inspection import ModelInspection
from mlx_paged_attention.engine.outputs import EngineInfo, MemoryPlan
from mlx_paged_attention.errors import InvalidRequestError, UnsupportedModelError
from mlx_paged_attention.models.cache_spec import observe_cache
from mlx_paged_attention.models.load import LoadedModel, load_model
from mlx_paged_attention.models.source import ModelSource
from mlx_paged_attention.runner.activations import measure_activations
from mlx_paged_attention.runner.grouping import choose_groups
from mlx_paged_attention.runner.kv_pool import make_pool
from mlx_paged_attention.runner.memory import device_memory
from mlx_paged_attention.runner.model_host import ModelHost
from mlx_paged_attention.runner.model_runner import ModelRunner
from mlx_paged_attention.runner.self_check import choose_layout
from mlx_paged_attention.text.grammar import Grammars

Progress = Callable[[str], None]

_NO_NUMBA = "numba is not installed: attention runs as plain MLX operations, which is slower on a CPU"


@dataclass(frozen=True)
class LoadedEngine:
    """A runner ready for its first step, and what it was derived from.

    Attributes:
        fingerprint: of the weights' content; part of every block hash.
    """

    info: EngineInfo
    runner: ModelRunner
    fingerprint: str


def load_engine(
    config: EngineConfig, source: ModelSource, progress: Progress, grammars: Grammars | None = None
) -> LoadedEngine:
    """Load the weights, and prepare them to run.

    Args:
        grammars: of the model's tokenizer, if it has one.

    Raises:
        ModelLoadError, UnsupportedModelError, InvalidRequestError: see the parts.
    """
    backend = choose_backend(config)
    if isinstance(config.kv_memory, int):  # once more when the weights have taken theirs
        check_budget(config.kv_memory, device_memory().free, "kv_memory", config.kv_memory)
    progress(f"loading {source.name}")
    loaded = load_model(source, dtype=config.dtype, device="cpu" if backend == "cpu" else "gpu")
    return prepare_engine(config, loaded, source.name, backend, progress, grammars)


def prepare_engine(
    config: EngineConfig,
    loaded: LoadedModel,
    name: str,
    backend: str,
    progress: Progress,
    grammars: Grammars | None = None,
) -> LoadedEngine:
    """Prove how the model runs, size and allocate the pool.

    Args:
        backend: of :func:`choose_backend`.

    Raises:
        UnsupportedModelError, InvalidRequestError, ModelLoadError: see the parts.
    """
    on_host = backend == "cpu"

    # Comes with the extra for Linux's CPU build; a Mac or a CUDA machine asked for its CPU may lack it.
    compiled = on_host and importlib.util.find_spec("numba") is not None
    notes = [_NO_NUMBA] if on_host and not compiled else []

    progress("checking the model against mlx-lm")
    host = ModelHost(loaded.model, compiled_loops=compiled)
    spec = observe_cache(loaded.model, block_size=config.block_size)
    layout = choose_layout(host, spec, vocab_size=loaded.vocab_size, on_host=compiled)

    grouping = choose_groups(spec, layout)
    windows = tuple(group.window for group in grouping.groups)
    if grouping.windows_kept is not None:
        notes.append(f"sliding windows are masked, and nothing behind them is freed: {grouping.windows_kept}")

    max_num_seqs, max_tokens = step_limits(config, on_host=on_host)
    activations, copies = measure_activations(host, spec, layout, max_tokens=max_tokens, on_host=compiled)
    activations += 2 * 4 * max_num_seqs * loaded.vocab_size  # logits, and what sampling makes of them
    free = device_memory()
    weights = sum(array.nbytes for array in dict(tree_flatten(loaded.model.parameters())).values())
    memory = MemoryPlan(free.limited_by, free.free + weights, weights, activations, copies)
    plan = plan_pool(
        config,
        bytes_per_block=spec.bytes_per_block_of(grouping.groups),
        windows=windows,
        bytes_per_state=spec.bytes_per_state,
        model_max_len=loaded.max_model_len,
        free_memory=free.free,
        step_memory=activations + copies,
        on_host=on_host,
    )
    start = plan.start_blocks or plan.num_blocks
    pool = make_pool(spec, start, host=compiled, groups=grouping.groups, max_blocks=plan.num_blocks)
    info = EngineInfo(
        model=name,
        backend=backend,
        dtype=loaded.dtype,
        forward=layout.name,
        vocab_size=loaded.vocab_size,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        bytes_per_token=pool.bytes_per_token,
        bytes_beyond_windows=spec.bytes_beyond_windows(grouping.groups),
        windows=windows,
        pool_bytes=pool.nbytes // start * plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        full_length_requests=plan.full_length_requests,
        bytes_per_state=spec.bytes_per_state,
        num_states=plan.num_states,
        start_blocks=plan.start_blocks,
        memory=memory,
        eos_token_ids=loaded.eos_token_ids,
        notes=[*loaded.notes, *notes, *plan.notes],
    )
    return LoadedEngine(info, ModelRunner(host, spec, pool, layout, grammars), loaded.fingerprint)


def inspect_model(config: EngineConfig, source: ModelSource, progress: Progress) -> ModelInspection:
    """How the model would run, without a pool.

    Raises:
        ModelLoadError, InvalidRequestError: it cannot be loaded.
    """
    backend = choose_backend(config)
    progress(f"loading {source.name}")
    loaded = load_model(source, dtype=config.dtype, device="cpu" if backend == "cpu" else "gpu")
    compiled = backend == "cpu" and importlib.util.find_spec("numba") is not None
    progress("checking the model against mlx-lm")
    host = ModelHost(loaded.model, compiled_loops=compiled)
    inspection = ModelInspection(source.name, backend, loaded.dtype, loaded.max_model_len)
    try:
        spec = observe_cache(loaded.model, block_size=config.block_size)
        inspection = inspection.with_layers(spec)
        layout = choose_layout(host, spec, vocab_size=loaded.vocab_size, on_host=compiled)
    except UnsupportedModelError as error:
        return replace(inspection, refusal=str(error))
    return replace(inspection, forward=layout.name).with_groups(
        spec, choose_groups(spec, layout), step_tokens=step_tokens(config, on_host=backend == "cpu")
    )


def choose_backend(config: EngineConfig) -> str:
    """Set MLX's device for this thread; ``"metal"``, ``"cuda"`` or ``"cpu"``."""
    gpu = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None
    if config.device == "gpu" and gpu is None:
        raise InvalidRequestError("device is gpu, but this MLX build has no GPU back end", "device")
    if config.device == "cpu" or gpu is None:
        mx.set_default_device(mx.cpu)
        return "cpu"
    mx.set_default_device(mx.gpu)
    return gpu
