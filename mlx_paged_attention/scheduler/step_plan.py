"""StepPlan and StepOutput: all that passes between scheduler and runner, as plain data.

Both round-trip through msgpack, so that a runner may live in another process.
"""

import msgspec

from mlx_paged_attention.sampling.params import RowSampling

# Stands in a plan for the token that the last step sampled for the request: it has not come back yet.
UNKNOWN_TOKEN = -1


class NewRow(msgspec.Struct, frozen=True):
    """A request the runner has not seen, or must see afresh after a preemption.

    Attributes:
        token_ids: every token known so far: the prompt and, after a preemption, the output.
        num_prompt_tokens: how many of them are prompt.
        sampling: how its rows are turned into tokens.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: RowSampling


class PlannedRow(msgspec.Struct, frozen=True):
    """What one request computes in one step.

    Attributes:
        token_ids: the tokens to compute, at positions ``start``, ``start + 1``, ...; or
            :data:`UNKNOWN_TOKEN` alone.
        new_block_ids: ids to append to the request's block tables before the step: equally many for
            each layer group, one group after the other. 0 is a block that lies behind a group's window.
        write_from: positions below it already hold their keys and values in a published
            block and must not be written (a fully cached prompt recomputes its last token).
        sample: whether the last token's logits become a new token.
        state_from: the slot that recurrent layers go on from; 0 before the first token.
        state_to: the slot for their state after these tokens; 0 if the model has no such layers.
    """

    request_id: str
    token_ids: list[int]
    start: int
    new_block_ids: list[int]
    write_from: int
    sample: bool
    state_from: int = 0
    state_to: int = 0


class TableChange(msgspec.Struct, frozen=True):
    """Another block takes the place of one in a request's tables, before ``new_block_ids`` are appended.

    Attributes:
        block_ids: the new block in each layer group.
    """

    request_id: str
    index: int
    block_ids: list[int]


class StepPlan(msgspec.Struct, frozen=True):
    """One step: rows in the order in which they must be able to see each other's writes.

    Attributes:
        new: requests that enter (or re-enter) the runner with this step.
        rows: at most one per request; a row may read blocks that an earlier row writes.
        copies: blocks (source, target) to copy before the rows are computed, one after the other.
        released: requests whose runner state may be dropped before the step (finished,
            aborted or preempted since the last plan).
        changes: of the tables of requests that are not new.
        num_blocks: that the pool has from this step on; 0 leaves it as it is. A plan without rows is there
            for this alone.
    """

    step: int
    new: list[NewRow]
    rows: list[PlannedRow]
    released: list[str]
    copies: list[tuple[int, int]] = []
    changes: list[TableChange] = []
    num_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(len(row.token_ids) for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log, of the raw logits) at one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its log-probability.
        rank: 1 for the most likely token.
        top: the k most likely ``(token id, logprob)`` pairs, most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class RowOutput(msgspec.Struct, frozen=True):
    """What a step yields for one request.

    Attributes:
        token_ids: the 0..k tokens sampled.
        logprobs: one entry per sampled token, or ``None`` if not asked for.
        prompt_logprobs: entries for the prompt positions ``start + 1`` ... that this step's
            logits score, or ``None`` if not asked for.
        failure: why this row, and none but it, could not be sampled; ``None`` if it could.
        by_form: the form asked for is the reason.
        complete: nothing may follow: its grammar allows no more.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    failure: str | None = None
    by_form: bool = False
    complete: bool = False


class StepOutput(msgspec.Struct, frozen=True):
    """The rows of a step that have something to report, in plan order."""

    step: int
    rows: list[RowOutput]
