"""Order: in which order kernels work on a pool that MLX does not know to be written.

MLX runs kernels in the order of their arguments: one that takes another's output comes after it. A
kernel that writes into the pool through an input changes no argument, so each kernel that touches the
pool also makes a tiny output, its ordering token, and takes the token of the one before it. What the
token holds means nothing. On Metal it is what makes MLX wait: kernels of one encoder run at the same
time, and a new encoder does not wait for the last, unless an input was an output there.
"""

import mlx.core as mx

from mlx_paged_attention.ops.kernels.make import unread


def no_token() -> mx.array:
    """The token of nothing: what takes it need not wait."""
    return unread()


class Order:
    """The last token of a pool.

    Every operation on the pool takes ``token`` and leaves its own in its place, so that all of them
    run in the order in which the program states them: reads after the writes they must see, writes
    into reused blocks after the reads of what was there, across layers, forwards and steps. Nothing
    is lost by so strict a rule: each layer waits for the one before it anyway.

    Evaluating ``token`` runs everything stated so far. Do so every step: what is never evaluated
    never runs, and a chain of lazy arrays keeps its arguments alive.
    """

    def __init__(self) -> None:
        self.token = no_token()
