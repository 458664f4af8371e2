"""A pool that loses memory in the middle of everything."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine_hooks import AnyLLM, engine_of, wrapped_launch


@contextmanager
def resizing_now_and_then(llm: AnyLLM, steps: int = 7) -> Iterator[None]:
    """After every few steps the pool loses all blocks that nobody holds, as if it had been idle."""
    engine = engine_of(llm)
    count = 0

    def shrink() -> None:
        while engine._in_flight:
            engine._land()
        engine._resize(2)

    def every_few(_plan: object) -> None:
        nonlocal count
        count += 1
        if count % steps == 0:
            llm._engine._send(shrink)

    with wrapped_launch(llm, every_few):
        yield
