"""PagedEngine: this package as a contestant."""

import queue
from collections.abc import Callable
from time import perf_counter

from mlx_paged_attention.api.start import Progress, start_engine
from mlx_paged_attention.bench.load import Load
from mlx_paged_attention.bench.timing import Timing
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.outputs import RequestOutput
from mlx_paged_attention.sampling.params import SamplingParams

_Arrival = tuple[int, float, RequestOutput | Exception]


class PagedEngine:
    """The engine behind ``LLM``, token ids in and out, each token reported as it comes."""

    def __init__(self, name: str, config: EngineConfig, progress: Progress | None = None) -> None:
        self.name = name
        self._engine = start_engine(config, progress).engine
        self.info = self._engine.info

    def run(self, load: Load) -> Timing:
        """Put all requests and wait for their last tokens.

        Raises:
            RequestFailedError, EngineDeadError: a step raised.
        """
        params = SamplingParams(temperature=0, max_tokens=load.output_len, ignore_eos=True, detokenize=False)
        arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        started = perf_counter()
        groups = [
            self._engine.prepare(f"bench-{index}", prompt, params, kind="delta", emit=_stamp(arrivals, index))
            for index, prompt in enumerate(load.prompts)
        ]
        for group in groups:
            self._engine.start(group)
        token_times: list[list[float]] = [[] for _ in groups]
        cached = 0
        running = len(groups)
        try:
            while running:
                index, when, output = arrivals.get()
                if isinstance(output, Exception):
                    raise output
                token_times[index] += [when - started] * len(output.outputs[0].token_ids)
                if output.finished:
                    running -= 1
                    cached += output.num_cached_tokens
        finally:
            for group in groups:
                self._engine.abort(group.request_id)  # those that have ended are ignored
        return Timing(token_times, cached)

    def close(self) -> None:
        self._engine.close()


def _stamp(
    arrivals: "queue.SimpleQueue[_Arrival]", index: int
) -> Callable[[RequestOutput | Exception], None]:
    return lambda output: arrivals.put((index, perf_counter(), output))
