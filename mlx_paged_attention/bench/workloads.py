"""The workloads: which loads are run, by whom, and what is measured of them."""

from collections.abc import Callable, Sequence

from mlx_paged_attention.bench.comparison import WARM_UP, Trial
from mlx_paged_attention.bench.contestant import Contestant, measure
from mlx_paged_attention.bench.load import Load, Prompts
from mlx_paged_attention.bench.settings import BenchSettings
from mlx_paged_attention.bench.timing import Timing, Values, end_to_end, first_token, latency, throughput
from mlx_paged_attention.errors import MlxPagedError

_WARM_UP_OUTPUT = 4
# A first token of a short prompt costs little to measure and varies much: measure more of them.
_FIRST_TOKENS_PER_PAIR = 3


def decode(
    contestants: Sequence[Contestant], settings: BenchSettings, prompts: Prompts, concurrency: int
) -> Trial:
    """Requests with nothing in common, all at once. No prompt is ever seen twice."""
    lengths = (settings.input_len, settings.output_len)

    def load(pair: int) -> Load:
        return Load(
            prompts.draw(f"decode {concurrency} {pair}", concurrency, lengths[0]), _output(lengths[1], pair)
        )

    return Trial(
        "decode",
        f"{_requests(concurrency)} of {lengths[0]} + {lengths[1]} tokens at once",
        {"concurrency": concurrency, "input_len": lengths[0], "output_len": lengths[1]},
        {one.name: _run(one, load, throughput, _uncached) for one in contestants},
        settings.pairs,
    )


def single_request(contestants: Sequence[Contestant], settings: BenchSettings, prompts: Prompts) -> Trial:
    """One request alone: how long until its first token, and between tokens."""
    lengths = (settings.input_len, settings.output_len)

    def load(pair: int) -> Load:
        return Load(prompts.draw(f"latency {pair}", 1, lengths[0]), _output(lengths[1], pair))

    return Trial(
        "latency",
        f"1 request of {lengths[0]} + {lengths[1]} tokens",
        {"concurrency": 1, "input_len": lengths[0], "output_len": lengths[1]},
        {one.name: _run(one, load, latency, _uncached) for one in contestants},
        settings.pairs,
    )


def shared_prefix(contestants: Sequence[Contestant], settings: BenchSettings, prompts: Prompts) -> Trial:
    """Requests that begin alike, all at once, with a prefix nobody has seen before."""
    count = settings.prefix_requests

    def load(pair: int) -> Load:
        (prefix,) = prompts.draw(f"prefix {pair}", 1, settings.prefix_len)
        suffixes = prompts.draw(f"suffixes {pair}", count, settings.suffix_len)
        return Load([prefix + suffix for suffix in suffixes], settings.prefix_output_len)

    return Trial(
        "shared-prefix",
        f"{_requests(count)} at once: {settings.prefix_len} tokens in common + {settings.suffix_len} "
        f"of their own + {settings.prefix_output_len} generated",
        {"concurrency": count, **_prefix_setting(settings), "output_len": settings.prefix_output_len},
        {one.name: _run(one, load, end_to_end) for one in contestants},
        settings.pairs,
    )


def warm_prefix(ours: Contestant, settings: BenchSettings, prompts: Prompts) -> Trial:
    """What a cached prefix still costs: first token of prefix + suffix, and of a suffix alone."""

    def warm(pair: int) -> Values:
        (prefix,) = prompts.draw(f"warm prefix {pair}", 1, settings.prefix_len)
        first, second = prompts.draw(f"warm suffixes {pair}", 2, settings.suffix_len)
        measure(ours, Load([prefix + first], 1))
        load = Load([prefix + second], 1)
        return first_token(load, measure(ours, load))

    def alone(pair: int) -> Values:
        load = Load(prompts.draw(f"suffix alone {pair}", 1, settings.suffix_len), 1)
        return first_token(load, measure(ours, load))

    return Trial(
        "shared-prefix",
        f"1 request of {settings.prefix_len} cached + {settings.suffix_len} new tokens, "
        f"and one of {settings.suffix_len} new tokens alone",
        {"concurrency": 1, **_prefix_setting(settings), "output_len": 1},
        {"warm prefix": warm, "suffix alone": alone},
        settings.pairs * _FIRST_TOKENS_PER_PAIR,
        ratio="cost",
    )


def _run(
    contestant: Contestant,
    load: Callable[[int], Load],
    values: Callable[[Load, Timing], Values],
    check: Callable[[Timing], None] = lambda _: None,
) -> Callable[[int], Values]:
    def run(pair: int) -> Values:
        one = load(pair)
        timing = measure(contestant, one)
        check(timing)
        return values(one, timing)

    return run


def _uncached(timing: Timing) -> None:
    if timing.cached_tokens:
        raise MlxPagedError(
            f"{timing.cached_tokens} prompt tokens were found in the prefix cache, none should be"
        )


def _output(length: int, pair: int) -> int:
    return min(length, _WARM_UP_OUTPUT) if pair == WARM_UP else length


def _requests(count: int) -> str:
    return f"{count} request" + ("" if count == 1 else "s")


def _prefix_setting(settings: BenchSettings) -> dict[str, int]:
    return {"prefix_len": settings.prefix_len, "suffix_len": settings.suffix_len}
