"""Contestant: whoever runs a load and says when each token came."""

from typing import Protocol

from mlx_paged_attention.bench.load import Load
from mlx_paged_attention.bench.timing import Timing
from mlx_paged_attention.errors import MlxPagedError


class Contestant(Protocol):
    """One engine with one model."""

    name: str

    def run(self, load: Load) -> Timing: ...

    def close(self) -> None: ...


def measure(contestant: Contestant, load: Load) -> Timing:
    """Run a load, and make sure that all of it was done.

    Raises:
        MlxPagedError: a request got more or fewer tokens than the load says.
    """
    timing = contestant.run(load)
    lengths = [len(times) for times in timing.token_times]
    if lengths != [load.output_len] * len(load.prompts):
        raise MlxPagedError(
            f"{contestant.name} gave answers of {sorted(set(lengths))} tokens to {len(lengths)} of "
            f"{len(load.prompts)} requests, where {load.output_len} were asked for: nothing can be compared"
        )
    return timing
