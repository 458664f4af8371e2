"""A contestant that computes nothing: its token times follow from the load."""

from mlx_paged_attention.bench.load import Load
from mlx_paged_attention.bench.timing import Timing


class FakeContestant:
    """Prefills one prompt after the other at 1 ms per token, then decodes at ``step`` seconds."""

    def __init__(self, name: str, step: float = 0.01, *, cached: int = 0, short_by: int = 0) -> None:
        self.name = name
        self.loads: list[Load] = []
        self._step = step
        self._cached = cached
        self._short_by = short_by

    def run(self, load: Load) -> Timing:
        self.loads.append(load)
        start = 0.001 * load.prompt_tokens
        times = [start + self._step * i for i in range(load.output_len - self._short_by)]
        return Timing([times for _ in load.prompts], self._cached)

    def close(self) -> None:
        pass
