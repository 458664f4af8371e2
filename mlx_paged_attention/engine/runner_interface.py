"""What the engine asks of a runner."""

from typing import Protocol

from mlx_paged_attention.scheduler.step_plan import StepOutput, StepPlan


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def read(self) -> StepOutput:
        """Wait for it."""
        ...


class Runner(Protocol):
    """What computes the steps, in the order in which they are launched.

    Attributes:
        runs_ahead: steps may be launched while the one before is being computed.
    """

    @property
    def runs_ahead(self) -> bool: ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. Like ``read``, it raises ``MemoryError`` if there is no memory for it."""
        ...
