"""The ways in which a step's tokens can go through a model."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """How a step becomes forwards.

    Attributes:
        pack: chunks join the single-token rows of the step, one row per token.
        dense: keys and values are gathered for the model's own attention.
        batch_rows: several sequences share a forward.
        compiled: steps are compiled where their shapes are few; needs a :class:`KernelPool`.
    """

    name: str
    pack: bool = False
    dense: bool = False
    batch_rows: bool = True
    compiled: bool = False

    def with_compiled_steps(self) -> "Layout":
        return replace(self, name=f"{self.name}, compiled", compiled=True)


# From fastest to most accepting. Which one a model gets is decided by :mod:`self_check`.
LAYOUTS = (
    Layout("packed rows", pack=True),
    Layout("row layout"),
    Layout("row layout, one sequence at a time", batch_rows=False),
    Layout("dense gather", dense=True),
    Layout("dense gather, one sequence at a time", dense=True, batch_rows=False),
)
