"""KernelReport: what came out of the check, as a block to paste and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_paged_attention.bench.spread import Spread, number
from mlx_paged_attention.kernel_check.jobs import Job, SpeedJob
from mlx_paged_attention.kernel_check.results import Checked, Failed, Result, Timed

# What compilers say is long, and an issue holds 65,536 characters.
_TOLD_IN_FULL, _LONG, _SHORT = 5, 2000, 200


@dataclass(frozen=True)
class KernelReport:
    """Every job with its result.

    Attributes:
        seconds: how long it all took.
    """

    results: list[tuple[Job, Result]]
    seconds: float

    @property
    def failures(self) -> list[tuple[Job, Failed]]:
        return [(job, result) for job, result in self.results if isinstance(result, Failed)]

    def as_markdown(self, facts: Sequence[str]) -> str:
        """The block to paste.

        Args:
            facts: what is to be known about the machine, a line each.
        """
        checks = [(job, result) for job, result in self.results if not isinstance(job, SpeedJob)]
        wrong = sum(isinstance(result, Failed) for _, result in checks)
        failed = len(self.failures)
        lines = ["### mlx-paged doctor --kernels", "", *(f"- {fact}" for fact in facts), ""]
        lines.append(
            f"{len(checks) - wrong} of {len(checks)} kernel variants compile and are right, "
            f"{failed} {'failure' if failed == 1 else 'failures'}; took {self.seconds:.0f} s."
        )
        lines += self._accuracy()
        lines += self._failures()
        lines += self._timings()
        return "\n".join(lines)

    def _accuracy(self) -> list[str]:
        worst: dict[float, float] = {}
        for _, result in self.results:
            if isinstance(result, Checked) and result.tolerance:
                worst[result.tolerance] = max(worst.get(result.tolerance, 0.0), result.error)
        if not worst:
            return []
        told = ", ".join(
            f"{error:.1e} ({tolerance:.0e} allowed)" for tolerance, error in sorted(worst.items())
        )
        return [f"Largest errors, relative to the largest value: {told}."]

    def _failures(self) -> list[str]:
        lines = []
        for index, (job, result) in enumerate(self.failures):
            limit = _LONG if index < _TOLD_IN_FULL else _SHORT
            said = result.problem if len(result.problem) <= limit else result.problem[:limit] + " ..."
            lines += ["", f"FAILED {job.name}", "", *(f"    {line}" for line in said.splitlines())]
        return lines

    def _timings(self) -> list[str]:
        lines = []
        for job, result in self.results:
            if isinstance(job, SpeedJob) and isinstance(result, Timed):
                paged, contiguous = Spread.of(result.paged), Spread.of(result.contiguous)
                ratios = [c / p for p, c in zip(result.paged, result.contiguous, strict=True)]
                lines.append(
                    f"| {job.rows} | {job.context:,} | {number(paged.median * 1e6)} | "
                    f"{number(contiguous.median * 1e6)} | {Spread.of(ratios)} | "
                    f"{number(job.kv_bytes / paged.median / 1e9)} |"
                )
        if not lines:
            return []
        return [
            "",
            "Decode, 32/8 heads of 128, bfloat16, in turns with MLX's attention over contiguous keys and",
            "values of the same tokens. Medians; where the ratio is above 1, paged is faster.",
            "",
            "| rows | context | paged, µs | contiguous, µs | ratio (lowest to highest) | paged, GB/s |",
            "|---:|---:|---:|---:|---:|---:|",
            *lines,
        ]

    def as_json(self) -> dict[str, Any]:
        """JSON-compatible: every job by name, with its result."""
        results = [{"job": job.name, **msgspec.to_builtins(result)} for job, result in self.results]
        return {"seconds": self.seconds, "failures": len(self.failures), "results": results}
