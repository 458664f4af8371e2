"""From settings to a report: load the contestants, run the trials in turns."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from mlx_paged_attention.bench import workloads
from mlx_paged_attention.bench.comparison import Comparison, Trial
from mlx_paged_attention.bench.contestant import Contestant
from mlx_paged_attention.bench.llama_cpp import LlamaCpp
from mlx_paged_attention.bench.load import Prompts
from mlx_paged_attention.bench.machine import Facts, blas_threads, machine_facts, usable_cores
from mlx_paged_attention.bench.paged import PagedEngine
from mlx_paged_attention.bench.report import Report
from mlx_paged_attention.bench.settings import BenchSettings
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.outputs import EngineInfo
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.models.source import resolve

Progress = Callable[[str], None]
_BUSY = 0.5  # load average per core from which others' work shows in the numbers


def run_bench(
    config: EngineConfig,
    settings: BenchSettings,
    *,
    mlx_lm: bool = True,
    llama_cpp: Path | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Measure this package, and the others beside it.

    Args:
        mlx_lm: compare with mlx-lm's BatchGenerator; it loads the weights a second time.
        llama_cpp: path of ``llama-batched-bench`` or ``llama-bench`` to compare with; it takes
            part in ``decode`` alone.
        progress: called with a line per stage.

    Raises:
        InvalidRequestError: the settings do not fit the engine or the program.
        MlxPagedError: a contestant failed.
    """
    started = time.monotonic()
    facts = machine_facts()
    with ExitStack() as stack:
        if llama_cpp is not None:  # refused before anything is loaded
            _llama(llama_cpp, config, settings, on_cpu=True)
        ours = stack.enter_context(closing(PagedEngine("ours", config, progress)))
        info = ours.info
        check_fits(settings, info)
        facts |= _model_facts(info)
        contestants: list[Contestant] = [ours]
        on_cpu = info.backend == "cpu"
        if mlx_lm:
            from mlx_paged_attention.bench.batch_generator import MlxLm

            progress("loading the weights once more, for mlx-lm")
            source = resolve(config.model, adapter=config.adapter_path, progress=False)
            contestants.append(stack.enter_context(closing(MlxLm(source, config.dtype, on_cpu=on_cpu))))
        llama = None if llama_cpp is None else _llama(llama_cpp, config, settings, on_cpu=on_cpu)
        prompts = Prompts(settings.seed, info.vocab_size)
        trials = make_trials(settings, prompts, ours, contestants, llama)
        comparisons = run_trials(trials)
    notes = _notes(facts, info, comparisons, [one.name for one in contestants], llama)
    return Report(settings, facts, comparisons, notes, time.monotonic() - started)


def make_trials(
    settings: BenchSettings,
    prompts: Prompts,
    ours: Contestant,
    contestants: Sequence[Contestant],
    llama: Contestant | None = None,
) -> list[Trial]:
    """The trials of the chosen workloads."""
    everyone = [*contestants, *([] if llama is None else [llama])]
    trials = []
    for workload in settings.workloads:
        match workload:
            case "decode":
                trials += [workloads.decode(everyone, settings, prompts, n) for n in settings.concurrency]
            case "shared-prefix":
                trials.append(workloads.shared_prefix(contestants, settings, prompts))
                trials.append(workloads.warm_prefix(ours, settings, prompts))
            case "latency":
                trials.append(workloads.single_request(contestants, settings, prompts))
    return trials


def run_trials(trials: Sequence[Trial]) -> list[Comparison]:
    """Run them one after the other, behind a progress bar on a terminal."""
    with tqdm(total=sum(trial.num_runs for trial in trials), unit="run", disable=None) as bar:

        @contextmanager
        def turn(name: str) -> Iterator[None]:
            bar.set_description(name)
            yield
            bar.update()

        comparisons = []
        for trial in trials:
            bar.set_postfix_str(trial.workload)
            comparisons.append(trial.run(turn))
        return comparisons


def check_fits(settings: BenchSettings, info: EngineInfo) -> None:
    """Refuse settings that the engine would serve in parts, or not at all.

    Raises:
        InvalidRequestError: with both numbers and the flag that helps.
    """
    for requests, tokens in settings.shapes():
        for wanted, limit, what, flag in (
            (requests, info.max_num_seqs, "requests at once", "max_num_seqs"),
            (tokens, info.max_model_len, "tokens per request", "max_model_len"),
            (requests * info.need.most(tokens), info.num_blocks - 1, "blocks in the KV pool", "kv_memory"),
        ):
            if wanted > limit:
                raise InvalidRequestError(
                    f"the benchmark needs {wanted} {what}, the engine has {limit}: raise "
                    f"--{flag.replace('_', '-')} or lower concurrency or lengths"
                )


def _llama(program: Path, config: EngineConfig, settings: BenchSettings, *, on_cpu: bool) -> LlamaCpp:
    if config.adapter_path is not None:
        raise InvalidRequestError(
            "llama.cpp would run without the adapter: leave out --adapter-path or --llama-cpp", "adapter_path"
        )
    source = resolve(config.model, progress=False)
    llama = LlamaCpp(program, source, threads=blas_threads() or usable_cores(), on_cpu=on_cpu)
    if not llama.batches and settings.concurrency != (1,):
        raise InvalidRequestError(
            f"{program.name} runs one sequence: use llama-batched-bench, or --concurrency 1", "llama_cpp"
        )
    return llama


def _model_facts(info: EngineInfo) -> Facts:
    facts: Facts = {"model": info.model, "dtype": info.dtype, "backend": info.backend, "steps": info.forward}
    if info.backend == "cpu" and importlib.util.find_spec("numba") is not None:
        import numba

        facts["attention threads"] = f"{numba.get_num_threads()} ({numba.threading_layer()})"
    return facts


def _notes(
    facts: Facts,
    info: EngineInfo,
    comparisons: Sequence[Comparison],
    names: Sequence[str],
    llama: LlamaCpp | None,
) -> list[str]:
    notes = [
        "Token ids in and out, greedy, no end of sequence; all requests of a run are put at once.",
        "decode, ms/step: steps in which every request decodes and none prefills. "
        "prefill, tok/s: all prompt tokens until the last request has its first token.",
        *info.notes,
    ]
    if "mlx-lm" in names:
        notes.append("mlx-lm: BatchGenerator with its own defaults, same weights, BLAS and process.")
    if llama is not None:
        notes.append("llama.cpp: its own program and the weights as the file has them, decode only.")
    notes += [
        f"{one.workload}, {one.title}: never were all requests decoding at once, so there is no "
        "time per step; raise --output-len"
        for one in comparisons
        if one.workload == "decode" and "decode_step_ms" not in one.metrics
    ]
    load, cores = facts["load average before"], facts["cores"]
    if float(load) > _BUSY * float(cores):
        notes.append(
            f"The machine was busy before this began (load {load} on {cores} cores): trust ratios only."
        )
    return notes
