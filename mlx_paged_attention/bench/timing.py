"""Timing: when each token of a load came, and the metrics that follow from it."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlx_paged_attention.bench.load import Load

Values = dict[str, float]


@dataclass(frozen=True)
class Metric:
    """How a number is called and which way is good."""

    label: str
    better: Literal["higher", "lower"]


METRICS = {
    "decode_step_ms": Metric("decode, ms/step", "lower"),
    "output_tokens_per_s": Metric("output, tok/s", "higher"),
    "total_tokens_per_s": Metric("prompt + output, tok/s", "higher"),
    "prefill_tokens_per_s": Metric("prefill, tok/s", "higher"),
    "ttft_ms": Metric("TTFT, ms", "lower"),
    "itl_p50_ms": Metric("ITL p50, ms", "lower"),
    "itl_p99_ms": Metric("ITL p99, ms", "lower"),
    "elapsed_s": Metric("end to end, s", "lower"),
}


@dataclass(frozen=True)
class Timing:
    """One run of a load.

    Attributes:
        token_times: for each request, when its tokens were known to the caller, in seconds
            since the load was put.
        cached_tokens: prompt tokens that were not computed, because the prefix cache had them.
    """

    token_times: list[list[float]]
    cached_tokens: int = 0

    @property
    def elapsed(self) -> float:
        return max(times[-1] for times in self.token_times)

    @property
    def last_first_token(self) -> float:
        """When the last request got its first token: all prompts are computed."""
        return max(times[0] for times in self.token_times)

    @property
    def ttft(self) -> float:
        """Time to first token, the median of the requests, in seconds."""
        return float(np.median([times[0] for times in self.token_times]))

    def decode_step(self) -> float | None:
        """Seconds per step while every request decodes and none prefills; ``None`` if never.

        Requests that got their first token early may have ended before the last prompt was
        computed. Steps that such a request no longer shares are left out: they are cheaper.
        """
        latest = max(self.token_times, key=lambda times: times[0])
        steps = min(len(times) - bisect_right(times, latest[0]) for times in self.token_times)
        return (latest[steps] - latest[0]) / steps if steps else None


def throughput(load: Load, timing: Timing) -> Values:
    """What a batch of requests is measured by; ``decode_step_ms`` only where there is such a step."""
    step = timing.decode_step()
    return ({} if step is None else {"decode_step_ms": step * 1e3}) | {
        "output_tokens_per_s": load.output_tokens / timing.elapsed,
        "total_tokens_per_s": (load.prompt_tokens + load.output_tokens) / timing.elapsed,
        "prefill_tokens_per_s": load.prompt_tokens / timing.last_first_token,
        "ttft_ms": timing.ttft * 1e3,
    }


def latency(_: Load, timing: Timing) -> Values:
    """What a person waits for: the first token, then each next one (inter-token latency)."""
    gaps = np.concatenate([np.diff(times) for times in timing.token_times])
    p50, p99 = np.percentile(gaps, [50, 99])
    return {"ttft_ms": timing.ttft * 1e3, "itl_p50_ms": float(p50) * 1e3, "itl_p99_ms": float(p99) * 1e3}


def end_to_end(_: Load, timing: Timing) -> Values:
    return {"elapsed_s": timing.elapsed, "ttft_ms": timing.ttft * 1e3}


def first_token(_: Load, timing: Timing) -> Values:
    return {"ttft_ms": timing.ttft * 1e3}
