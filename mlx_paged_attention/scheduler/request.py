"""Request: one sequence on its way through the engine, from its prompt to its last token."""

import enum
from collections.abc import Collection, Sequence

from mlx_paged_attention.cache.block_hash import BlockHasher
from mlx_paged_attention.sampling.params import RowSampling


class RequestStatus(enum.Enum):
    """WAITING → RUNNING → FINISHED_*; RUNNING → PREEMPTED → RUNNING; any of them → FINISHED_*."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """Tokens, progress and state of one sequence.

    Args:
        prompt_token_ids: at least one.
        sampling: how its rows are turned into tokens; the scheduler only passes it on.
        max_tokens: most output tokens, at least 1.
        min_tokens: output tokens before which no stop token ends it.
        eos_token_ids: the model's end-of-sequence ids, without effect if ``ignore_eos``.
        stop_token_ids: further ids that end it, each reported as ``stop_reason``.
        priority: lower is served first under the priority policy.
        arrival_time: seconds of any clock; ties in priority go to the earlier.
        cache_salt: shares cached prefixes only with requests of the same salt.
        adapter: name of the adapter it is computed with; its blocks are the adapter's own.
        is_steered: its tokens are chosen elsewhere, among what is sampled for it.

    Attributes:
        token_ids: prompt, then output; all tokens known so far.
        num_computed_tokens: of those, how many the steps planned so far compute or find cached.
        runs_ahead: its next token may be computed while the one before is on its way.
        num_samples_in_flight: planned rows that sample for it and whose output has not come back.
        num_tokens_in_flight: tokens of its planned rows whose output has not come back.
        awaits_choice: it is steered, and what was sampled for it is known.
        num_cached_tokens: prompt tokens that were found cached when it was first admitted.
        num_preemptions: how often it lost its blocks and had to start again.
        block_hashes: digest of each full block of ``token_ids``; stays empty without caching.
        prefix_start: names what comes before the first block: whose prefixes it may share.
        arrival_order: place among all requests, set by the scheduler.
        stop_reason: the stop string or stop token id that ended it; ``None`` for end of sequence.

    Raises:
        ValueError: the prompt is empty or ``max_tokens`` is below 1.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: RowSampling,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_ids: Collection[int] = (),
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        arrival_time: float = 0.0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        is_steered: bool = False,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id} has an empty prompt")
        if max_tokens < 1:
            raise ValueError(f"request {request_id} has max_tokens {max_tokens}; it must be at least 1")
        self.request_id = request_id
        self.sampling = sampling
        self.runs_ahead = sampling.runs_ahead and not is_steered
        self.is_steered = is_steered
        self.awaits_choice = False
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(stop_token_ids)
        self.ignore_eos = ignore_eos
        self.priority = priority
        self.arrival_time = arrival_time
        self.arrival_order = 0
        self.cache_salt = cache_salt
        self.adapter = adapter

        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_samples_in_flight = 0
        self.num_tokens_in_flight = 0
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        self.prefix_start = b""
        self.status = RequestStatus.WAITING
        self.stop_reason: str | int | None = None
        self._hasher: BlockHasher | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status in _FINISH_REASONS

    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or ``None`` while it is alive."""
        return _FINISH_REASONS.get(self.status)

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Log-probabilities of the prompt come from computing it, so none of it may be skipped."""
        return self.sampling.prompt_logprobs is not None

    @property
    def service_key(self) -> tuple[int, float, int]:
        """Order of service under the priority policy, smallest first."""
        return (self.priority, self.arrival_time, self.arrival_order)

    def start_hashing(self, hasher: BlockHasher, known: Sequence[bytes] = ()) -> None:
        """From now on ``block_hashes`` covers every full block; once is enough.

        Args:
            known: hashes of the first blocks, from a request that begins with the same tokens.
        """
        if self._hasher is not None:
            return
        self._hasher = hasher
        self.prefix_start = hasher.start(adapter=self.adapter, cache_salt=self.cache_salt)
        self.block_hashes = list(known)
        self._extend_hashes()

    def append_token(self, token_id: int) -> None:
        """Adds one output token."""
        self.token_ids.append(token_id)
        if self._hasher is not None and len(self.token_ids) % self._hasher.block_size == 0:
            self._extend_hashes()

    def admit(self, num_computed_tokens: int) -> None:
        """It enters the running requests with this many tokens already cached."""
        assert self.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), self
        if self.status is RequestStatus.WAITING:
            self.num_cached_tokens = num_computed_tokens
        self.num_computed_tokens = num_computed_tokens
        self.status = RequestStatus.RUNNING

    def preempt(self) -> None:
        """It has lost its blocks; its tokens stay, and are computed again when it is resumed."""
        assert self.status is RequestStatus.RUNNING, self
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def finish(self, status: RequestStatus, stop_reason: str | int | None = None) -> None:
        assert not self.is_finished, self
        assert status in _FINISH_REASONS, status
        self.status = status
        self.stop_reason = stop_reason

    def _extend_hashes(self) -> None:
        assert self._hasher is not None
        self._hasher.extend(
            self.block_hashes, self.token_ids, adapter=self.adapter, cache_salt=self.cache_salt
        )
