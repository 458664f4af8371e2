"""MlxLm: mlx-lm's own continuous batching as a contestant."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import TypeVar

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from mlx_paged_attention.bench.load import Load
from mlx_paged_attention.bench.timing import Timing
from mlx_paged_attention.config import DType
from mlx_paged_attention.engine.mlx_thread import run_on_mlx_thread
from mlx_paged_attention.errors import MlxPagedError
from mlx_paged_attention.models.load import load_model
from mlx_paged_attention.models.source import ModelSource

# BatchGenerator's own default; more only where more requests are to run at once.
_COMPLETION_BATCH = 32

_T = TypeVar("_T")


class MlxLm:
    """``mlx_lm.generate.BatchGenerator`` on the weights that this package would load.

    Like the engine it has a thread of its own: MLX's arrays belong to the thread that made them.

    Args:
        on_cpu: run on MLX's CPU back end, whatever its default is.

    Raises:
        ModelLoadError: as the engine's loading.
    """

    name = "mlx-lm"

    def __init__(self, source: ModelSource, dtype: DType, *, on_cpu: bool) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = run_on_mlx_thread(self._serve)
        try:
            self._call(lambda: self._load(source, dtype, on_cpu))
        except BaseException:
            self.close()
            raise

    def run(self, load: Load) -> Timing:
        """Insert all requests and step until the last has ended.

        Raises:
            MlxPagedError: mlx-lm cannot run this model in a batch.
        """
        try:
            return self._call(lambda: self._run(load))
        except Exception as error:  # whatever model code raises
            raise MlxPagedError(
                f"mlx-lm's BatchGenerator failed ({type(error).__name__}: {error}); "
                "measure without it: --no-mlx-lm"
            ) from error

    def close(self) -> None:
        """End the thread's work and give the weights back."""
        self._jobs.put(None)
        self._ended.wait()

    def _call(self, job: Callable[[], _T]) -> _T:
        """Run a job on the thread and wait for what it returns or raises."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(run)
        return future.result()

    # ---- on the thread

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self.__dict__.pop("_model", None)
        mx.clear_cache()

    def _load(self, source: ModelSource, dtype: DType, on_cpu: bool) -> None:
        device = mx.cpu if on_cpu else mx.gpu
        mx.set_default_device(device)
        self._model = load_model(source, dtype=dtype, device="cpu" if on_cpu else "gpu").model
        self._stream = mx.new_stream(device)

    def _run(self, load: Load) -> Timing:
        count = len(load.prompts)
        generator = BatchGenerator(
            self._model,
            max_tokens=load.output_len,
            completion_batch_size=max(_COMPLETION_BATCH, count),
            stream=self._stream,
        )
        try:
            started = perf_counter()
            uids = generator.insert(load.prompts)
            times: dict[int, list[float]] = {uid: [] for uid in uids}
            running = count
            while running:
                prompts, responses = generator.next()
                if not prompts and not responses:
                    raise RuntimeError(f"{running} of {count} requests were forgotten")
                now = perf_counter() - started
                for response in responses:
                    times[response.uid].append(now)
                    running -= response.finish_reason is not None
        finally:
            # It computes one step ahead: what it began must not run into the next contestant's time.
            mx.synchronize(self._stream)
            generator.close()
        return Timing([times[uid] for uid in uids])
