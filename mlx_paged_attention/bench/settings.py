"""BenchSettings: how much is measured."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from mlx_paged_attention.errors import InvalidRequestError

Workload = Literal["decode", "shared-prefix", "latency"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Lengths in tokens. The defaults are the quick run: under two minutes with SmolLM2 on two cores.

    Attributes:
        concurrency: numbers of requests at once, of the workload ``decode``.
        input_len: prompt length of ``decode`` and ``latency``.
        output_len: answer length of both.
        prefix_len: what all prompts of ``shared-prefix`` begin with.
        suffix_len: what each of them has of its own.
        prefix_requests: how many requests share the prefix.
        prefix_output_len: answer length of each of them.
        pairs: how often each contestant is measured.
        seed: of the prompts.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    workloads: tuple[Workload, ...] = WORKLOADS
    concurrency: tuple[int, ...] = (1, 8)
    input_len: int = 64
    output_len: int = 24
    prefix_len: int = 256
    suffix_len: int = 32
    prefix_requests: int = 4
    prefix_output_len: int = 8
    pairs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # A gap between tokens needs two of them.
            least = {"output_len": 2, "seed": 0}.get(field.name, 1)
            if isinstance(value, tuple):
                if not value:
                    raise InvalidRequestError(f"{field.name} is empty", field.name)
                value = min(value) if isinstance(value[0], int) else least
            if value < least:
                raise InvalidRequestError(f"{field.name} must be at least {least}, not {value}", field.name)

    def shapes(self) -> list[tuple[int, int]]:
        """Of every load: requests at once, and tokens of each, its answer included."""
        plain = self.input_len + self.output_len
        shared = self.prefix_len + self.suffix_len + self.prefix_output_len
        by_workload: dict[Workload, list[tuple[int, int]]] = {
            "decode": [(requests, plain) for requests in self.concurrency],
            "shared-prefix": [(self.prefix_requests, shared)],
            "latency": [(1, plain)],
        }
        return [shape for workload in self.workloads for shape in by_workload[workload]]


QUICK = BenchSettings()
FULL = BenchSettings(
    concurrency=(1, 8, 32),
    input_len=512,
    output_len=128,
    prefix_len=1000,
    suffix_len=64,
    prefix_requests=16,
    prefix_output_len=16,
    pairs=7,
)
