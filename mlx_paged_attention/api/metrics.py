"""Metrics: what Prometheus reads, under vLLM's names so that dashboards made for it work.

Numbers of the engine (running requests, cache use) are read when scraped. Numbers of requests are taken from
the ``RequestOutput`` stream itself, so that every path through the server is counted in the same place.

Histogram bounds are vLLM's (``vllm/v1/metrics/buckets.py``); other bounds would bend a dashboard's quantiles.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_paged_attention.engine.outputs import RequestMetrics, RequestOutput
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams

if TYPE_CHECKING:
    from mlx_paged_attention.api.async_llm import AsyncLLM

_TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LABELS = ("model_name", "engine")


class Metrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self, llm: "AsyncLLM", model_name: str) -> None:
        self.in_flight = 0
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(llm, model_name))
        labels = (model_name, "0")

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(*labels)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=bounds)
            return family.labels(*labels)

        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of requests that reached their first token."
        )
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Of those, found in the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        finished = Counter(
            "vllm:request_success", "Requests ended.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self.finished = {reason: finished.labels(*labels, reason) for reason in ("stop", "length", "abort")}

        counts = _token_bounds(llm.info.max_model_len)
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BOUNDS)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _ITL_BOUNDS)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY_BOUNDS)
        self.queue = histogram("request_queue_time_seconds", "Arrival to first step.", _LATENCY_BOUNDS)
        self.prefill = histogram(
            "request_prefill_time_seconds", "First step to first token.", _LATENCY_BOUNDS
        )
        self.decode = histogram("request_decode_time_seconds", "First token to end.", _LATENCY_BOUNDS)
        self.inference = histogram("request_inference_time_seconds", "First step to end.", _LATENCY_BOUNDS)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens per request.", counts)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated per request.", counts
        )
        self.request_params_n = histogram("request_params_n", "n as asked.", (1, 2, 5, 10, 20))
        self.request_params_max_tokens = histogram(
            "request_params_max_tokens", "max_tokens as asked.", counts
        )

    async def observe(
        self, outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass a request's delta (or final) outputs on and count them; closing it closes ``outputs``."""
        observation = _Observation(self, params)
        self.in_flight += 1
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    observation.add(output)
                    yield output
        except InvalidRequestError:
            observation.refused = True
            raise
        finally:
            self.in_flight -= 1
            observation.end()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Observation:
    """What has been seen of one request.

    Attributes:
        refused: it never became a request of the engine's, and so ended in no way.
    """

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self.refused = False
        self._metrics = metrics
        self._params = params
        self._last: RequestOutput | None = None
        self._generated = 0
        self._reason: str | None = None
        self._token_times: dict[int, float] = {}  # by answer: when its latest token came

    def add(self, output: RequestOutput) -> None:
        m, times = self._metrics, output.metrics
        if self._last is None:
            m.prompt_tokens.inc(len(output.prompt_token_ids))
            m.prompt_tokens_cached.inc(output.num_cached_tokens)
            if times.first_token_time is not None:
                m.ttft.observe(times.first_token_time - times.arrival_time)
        self._last = output
        now = times.finished_time if times.finished_time is not None else time.monotonic()
        for answer in output.outputs:
            self._reason = answer.finish_reason or self._reason
            self._add_tokens(answer.index, len(answer.token_ids), now, times)

    def _add_tokens(self, index: int, count: int, now: float, times: RequestMetrics) -> None:
        if count == 0:
            return
        self._generated += count
        self._metrics.generation_tokens.inc(count)
        since = self._token_times.get(index)
        self._token_times[index] = now
        if since is None:
            since, count = times.first_token_time or now, count - 1
        # Tokens that arrived together share the time since the one before them.
        for _ in range(count):
            self._metrics.itl.observe(max(0.0, now - since) / count)

    def end(self) -> None:
        if self.refused:
            return
        m, last = self._metrics, self._last
        ended = last is not None and last.finished
        reason = (self._reason if ended else None) or "abort"
        m.finished[reason].inc()
        if last is None:  # gone before its first token: nothing of it was counted above either
            return
        m.request_prompt_tokens.observe(len(last.prompt_token_ids))
        m.request_generation_tokens.observe(self._generated)
        m.request_params_n.observe(self._params.n)
        if self._params.max_tokens is not None:
            m.request_params_max_tokens.observe(self._params.max_tokens)
        arrival, scheduled = last.metrics.arrival_time, last.metrics.first_scheduled_time
        first, finished = last.metrics.first_token_time, last.metrics.finished_time
        for histogram, start, stop in (
            (m.queue, arrival, scheduled),
            (m.prefill, scheduled, first),
            (m.decode, first, finished),
            (m.inference, scheduled, finished),
            (m.e2e, arrival, finished),
        ):
            if start is not None and stop is not None:
                histogram.observe(stop - start)


class _EngineCollector(Collector):
    """The engine's own numbers, read at the moment of the scrape."""

    def __init__(self, llm: "AsyncLLM", model_name: str) -> None:
        self._llm = llm
        self._labels = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        stats, info = self._llm.stats(), self._llm.info

        def family(
            kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float
        ) -> Metric:
            metric = kind(f"vllm:{name}", text, labels=_LABELS)
            metric.add_metric(self._labels, value)
            return metric

        usable = stats.num_blocks - 1  # the null block serves nobody
        gauge, count = GaugeMetricFamily, CounterMetricFamily
        yield family(gauge, "kv_pool_bytes", "Bytes of the KV pool now.", stats.pool_bytes)
        yield family(gauge, "kv_pool_budget_bytes", "Bytes that it may grow to.", stats.pool_budget_bytes)
        yield family(count, "kv_pool_growths", "Times it grew.", stats.pool_growths)
        yield family(count, "kv_pool_shrinks", "Times it gave memory back.", stats.pool_shrinks)
        yield family(
            count, "kv_pool_growths_refused", "Times it lacked memory to grow.", stats.pool_growths_refused
        )
        yield family(gauge, "num_requests_running", "Requests being computed.", stats.running)
        yield family(gauge, "num_requests_waiting", "Requests waiting for admission.", stats.waiting)
        yield family(
            gauge, "kv_cache_usage_perc", "Blocks held by requests, 1 is all.", stats.used_blocks / usable
        )
        yield family(count, "num_preemptions", "Times a request lost its blocks.", stats.preemptions)
        yield family(
            count, "prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries
        )
        yield family(count, "prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the KV cache.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
        )
        config.add_metric((*self._labels, str(info.block_size), str(info.num_blocks), info.dtype), 1)
        yield config


def _token_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to the longest request."""
    bounds = (mantissa * 10**exponent for exponent in range(10) for mantissa in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= max_model_len)
