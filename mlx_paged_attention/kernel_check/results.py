"""Results: how a job ended. Plain data, one result per job."""

import msgspec


class Checked(msgspec.Struct, frozen=True, tag=True):
    """The kernel compiled and is right.

    Attributes:
        error: the largest, relative to the largest value of the reference.
        tolerance: what it may be.
    """

    error: float
    tolerance: float


class Timed(msgspec.Struct, frozen=True, tag=True):
    """Seconds per call, one number per round, and both gave the same attention."""

    paged: list[float]
    contiguous: list[float]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What went wrong, for a person; may be many lines where a compiler says it."""

    problem: str


Result = Checked | Timed | Failed
