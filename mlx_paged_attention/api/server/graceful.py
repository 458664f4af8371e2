"""GracefulServer: uvicorn's server, which ends answers that still run instead of cutting them off."""

import asyncio
import logging
import socket
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from mlx_paged_attention.api.report import counted

if TYPE_CHECKING:
    from mlx_paged_attention.api.async_llm import AsyncLLM

GRACE_SECONDS = 5.0  # for running answers to come to their own end
LAST_SECONDS = 5.0  # for the ends of aborted ones to reach their clients
_TICK = 0.05

logger = logging.getLogger("uvicorn.error")  # its lines are the server's log


class GracefulServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn is not followed
    """Serves ``llm`` until a signal.

    A first signal: no new connections; answers may go on for ``GRACE_SECONDS``, then they are aborted, so
    that each stream still gets a last chunk with finish reason ``"abort"`` and its ``[DONE]``; whoever has
    not read that after ``LAST_SECONDS`` more is cut off. A second signal cuts everybody off at once.
    """

    def __init__(self, config: uvicorn.Config, llm: "AsyncLLM") -> None:
        super().__init__(config)
        self._llm = llm

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(super().shutdown(sockets))
        await self._wait(closing, GRACE_SECONDS)
        if not self._over(closing):
            if running := self._llm.abort_all():
                logger.warning(
                    "%s still running %g s after the signal to stop: aborted",
                    counted(running, "request"),
                    GRACE_SECONDS,
                )
            await self._wait(closing, LAST_SECONDS, aborting=True)
        if self.server_state.connections or self.server_state.tasks:
            await self._cut_off()
        await closing
        if self.force_exit:  # then uvicorn leaves the application without a word
            await self.lifespan.shutdown()

    async def _wait(self, closing: "asyncio.Task[None]", seconds: float, *, aborting: bool = False) -> None:
        """Until every connection has closed, a second signal has come, or ``seconds`` are over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self._over(closing) and loop.time() < deadline:
            if aborting:  # what had been read but was not yet running a moment ago
                self._llm.abort_all()
            await asyncio.wait([closing], timeout=_TICK)

    def _over(self, closing: "asyncio.Task[None]") -> bool:
        return closing.done() or self.force_exit

    async def _cut_off(self) -> None:
        """Close every connection; to the task that answers on it this looks like a client that left."""
        connections, tasks = list(self.server_state.connections), list(self.server_state.tasks)
        if connections:
            logger.warning("%s cut off", counted(len(connections), "connection"))
        for connection in connections:
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_SECONDS)
        self.force_exit = True  # nothing more is waited for
