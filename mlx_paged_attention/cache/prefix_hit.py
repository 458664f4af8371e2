"""PrefixHit: what of a prompt was found in the cache; and counts of such lookups."""

from dataclasses import dataclass
from typing import Protocol


class CachedRequest(Protocol):
    """What the manager reads of a request; it changes none of it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_tokens_in_flight: int
    num_preemptions: int
    block_hashes: list[bytes]
    prefix_start: bytes

    @property
    def skip_reading_prefix_cache(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The published blocks at the start of a request's tokens.

    Attributes:
        block_ids: in table order, one layer group after the other, and 0 for those behind a group's window.
        num_tokens: tokens that need not be computed. One less than the blocks hold if they hold
            the whole sequence: its last token is computed again, for its logits.
        copied_from: a published block that begins with the tokens after those of ``block_ids``: a copy of it
            saves computing them; 0 if there is none.
        state_slot: where the recurrent layers' state after these tokens is; 0 without any.
        num_found: with such layers, tokens in published blocks, also those after the last snapshot.
    """

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    copied_from: int = 0
    state_slot: int = 0
    num_found: int = 0


@dataclass(slots=True)
class PrefixCacheStats:
    """Lookups of admitted requests, in requests and tokens. ``preempted_*``: those of resumed ones."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, request: CachedRequest, hit: PrefixHit) -> None:
        """A request was admitted with this."""
        queries = len(request.token_ids)
        if request.num_preemptions:
            self.preempted_requests += 1
            self.preempted_queries += queries
            self.preempted_hits += hit.num_tokens
        else:
            self.requests += 1
            self.queries += queries
            self.hits += hit.num_tokens
