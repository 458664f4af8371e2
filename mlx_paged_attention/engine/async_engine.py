"""AsyncEngine: the one thread that owns MLX, and the way in and out of it."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.blocks_view import BlocksView
from mlx_paged_attention.engine.engine import Engine
from mlx_paged_attention.engine.group import Emit, OutputKind, RequestGroup
from mlx_paged_attention.engine.mlx_thread import run_on_mlx_thread
from mlx_paged_attention.engine.outputs import EngineInfo, EngineStats, RequestOutput
from mlx_paged_attention.engine.watchdog import Watchdog, thread_stacks
from mlx_paged_attention.errors import EngineDeadError, InvalidRequestError
from mlx_paged_attention.models.source import ModelSource
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.tokenizer import Tokenizer

Progress = Callable[[str], None]
_Command = Callable[[], None]
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Loads a model and serves it on a thread of its own.

    MLX's streams belong to the thread that made them, so weights, pool and every step live on
    that one thread. Callers talk to it through a queue of commands; outputs come back through
    each request's ``emit``, called on the engine's thread.

    Args:
        progress: called with a line per stage of loading.

    Raises:
        ModelLoadError, UnsupportedModelError, InvalidRequestError: it could not be loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        tokenizer: Tokenizer | None,
        progress: Progress,
    ) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._dead: EngineDeadError | None = None
        self._stalled: str | None = None
        self._abandoned = threading.Event()  # the thread hangs, and nobody waits for it any more
        self._open: set[_Outlet] = set()  # of requests that were started, and are to get more outputs
        self._busy = False
        self._turns = 0
        self._thread_id: int | None = None
        self._started: queue.SimpleQueue[Engine | BaseException] = queue.SimpleQueue()
        try:
            self._ended = run_on_mlx_thread(lambda: self._run(config, source, tokenizer, progress))
            result = self._started.get()
            if isinstance(result, BaseException):
                self._ended.wait()
                raise result
            self._engine = result
            self._stats = result.stats()
        except BaseException:  # failed, or interrupted: nobody will close what is being loaded
            self._closing = True
            self._commands.put(lambda: None)
            raise

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def dead_reason(self) -> str | None:
        """Why the engine stopped serving, or ``None`` while it serves."""
        return None if self._dead is None else str(self._dead)

    @property
    def stalled_reason(self) -> str | None:
        """What the watchdog has seen, or ``None``: the engine may yet go on."""
        return self._stalled

    def stats(self) -> EngineStats:
        """Counts after the last step or command."""
        return self._stats

    def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        kind: OutputKind,
        emit: Emit,
    ) -> RequestGroup:
        """Check a request without queueing it; :meth:`start` does.

        Args:
            emit: receives its outputs, the last one with ``finished``, or an error in its place.

        Raises:
            InvalidRequestError, RequestTooLongError: it cannot be served.
        """
        return self._engine.prepare(request_id, prompt, params, kind=kind, emit=_Outlet(self, emit))

    def fork(
        self,
        parent_id: str,
        request_id: str,
        params: SamplingParams | None,
        *,
        index: int,
        kind: OutputKind,
        emit: Emit,
    ) -> Emit:
        """Begin a request that goes on from what answer ``index`` of another has said so far.

        Args:
            emit: as for :meth:`prepare`; an ``InvalidRequestError`` comes this way, too.

        Returns:
            What :meth:`abort` knows the request by, before and after it has begun.

        Raises:
            EngineDeadError: the engine no longer serves.
        """
        outlet = _Outlet(self, emit)

        def begin() -> None:
            if self._dead is not None:
                outlet(self._dead)
                return
            try:
                self._engine.fork(parent_id, request_id, params, index=index, kind=kind, emit=outlet)
            except InvalidRequestError as error:
                outlet(error)

        self._send(begin, opens=outlet)
        return outlet

    def start(self, group: RequestGroup) -> None:
        """Queue a prepared request.

        Raises:
            EngineDeadError: the engine no longer serves.
        """
        assert isinstance(group.emit, _Outlet)
        self._send(lambda: self._add(group), opens=group.emit)

    def abort(self, request: str | RequestGroup | Emit) -> None:
        """End a request at the next step border; its ``emit`` gets a last output.

        Whoever gives up waiting names the request itself: its id may belong to another.
        """
        # A dead engine has already ended every request.
        with contextlib.suppress(EngineDeadError):
            self._send(lambda: self._engine.abort(request))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False while requests hold blocks."""
        return self._ask(lambda: self._engine.reset_prefix_cache())

    def blocks(self) -> BlocksView:
        """Who holds which block, as of the next step border, for which this waits."""
        return self._ask(lambda: self._engine.blocks())

    @property
    def is_sleeping(self) -> bool:
        """The pool has been given back, and no request has come since."""
        return self._engine.is_sleeping

    def sleep(self) -> None:
        """Give the pool's memory back, and forget every cached prefix. The next request wakes the engine.

        Raises:
            EngineBusyError: requests are being served.
            PoolMemoryError: there is no memory for a smaller pool beside this one; it stays as it is.
        """
        self._ask(lambda: self._change_size(self._engine.sleep))

    def wake_up(self) -> None:
        """End a sleep now: the pool has the size that it had at start.

        Raises:
            PoolMemoryError: there is no memory for it.
        """
        self._ask(lambda: self._change_size(self._engine.wake_up))

    def close(self) -> None:
        """Stop the thread; requests still being served get an :class:`EngineDeadError`."""
        self._closing = True
        self._commands.put(lambda: None)
        # Garbage collection may close an engine from that engine's own thread.
        if threading.get_ident() != self._thread_id:
            while not self._ended.wait(timeout=1.0) and not self._abandoned.is_set():
                pass

    # ---- on the engine's thread

    def _run(
        self,
        config: EngineConfig,
        source: ModelSource,
        tokenizer: Tokenizer | None,
        progress: Progress,
    ) -> None:
        self._thread_id = threading.get_ident()
        try:
            # Imported here: whoever only talks to the engine needs no MLX.
            from mlx_paged_attention.engine.loading import load_engine

            grammars = None if tokenizer is None else tokenizer.grammars
            loaded = load_engine(config, source, progress, grammars)
            engine = Engine(config, loaded.info, loaded.runner, loaded.fingerprint, tokenizer)
        except BaseException as error:
            self._started.put(error)
            return
        self._started.put(engine)
        cause: BaseException | None = None
        watchdog = Watchdog(
            config.watchdog_seconds,
            busy=lambda: self._busy,
            progress=lambda: self._turns,
            stalled=lambda seconds: self._stall(engine, seconds),
            resumed=self._resume,
            give_up=self._give_up,
        )
        try:
            with watchdog:
                self._serve(engine)
            message = "the engine was closed"
        except BaseException as error:
            cause = error
            message = f"the engine stopped after {type(error).__name__}: {error}"
            logger.exception("the engine has stopped; no request can be served until it is started again")
        dead = EngineDeadError(message)
        dead.__cause__ = cause
        with self._lock:
            dead = self._dead = self._dead or dead
        # Closed before the last commands run: they find no request in books that may no longer agree.
        engine.close(dead)
        self._drain()  # nothing more can be sent; what was is answered
        with self._lock:
            left = list(self._open)
        for outlet in left:  # of requests that were in no books: what queued them raised
            outlet(dead)
        self._stats = engine.stats()

    def _serve(self, engine: Engine) -> None:
        while not self._closing and not self._abandoned.is_set():
            if not engine.has_work:
                self._busy = False
                try:
                    command: _Command | None = self._commands.get(timeout=engine.idle_seconds())
                except queue.Empty:
                    command = None
                self._busy = True
                if command is not None:
                    command()
                engine.give_back()
            self._drain()
            if engine.has_work and not self._closing and not self._abandoned.is_set():
                engine.step()
            self._turns += 1
            self._stats = engine.stats()

    def _drain(self) -> None:
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _add(self, group: RequestGroup) -> None:
        if self._dead is not None:
            group.emit(self._dead)
            return
        try:
            self._engine.add(group)
        except InvalidRequestError as error:
            group.emit(error)

    def _change_size(self, change: Callable[[], None]) -> None:
        if self._dead is not None:  # since this was asked
            raise self._death()
        change()
        self._stats = self._engine.stats()

    def _ask(self, question: Callable[[], _T]) -> _T:
        """What ``question`` returns or raises on the engine's thread, between two steps."""
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # the asker's, and no reason for the engine to end
                answer.set_exception(error)

        self._send(run)
        while not wait([answer], timeout=1.0).done:
            if self._abandoned.is_set():
                raise self._death()
        return answer.result()

    def _send(self, command: _Command, opens: "_Outlet | None" = None) -> None:
        with self._lock:
            if self._dead is not None:
                raise self._death()
            if opens is not None:
                self._open.add(opens)
            self._commands.put(command)

    def _death(self) -> EngineDeadError:
        """An error of its own for each who asks of a dead engine."""
        assert self._dead is not None
        error = EngineDeadError(str(self._dead))
        error.__cause__ = self._dead.__cause__
        return error

    # ---- on the watchdog's thread, while the engine's hangs

    def _stall(self, engine: Engine, seconds: float) -> None:
        reason = f"no step has ended for {seconds:.0f} s, and there is work to do"
        logger.error("%s\n%s\n%s", reason, engine.describe(), thread_stacks())
        self._stalled = reason  # whoever sees it finds the report

    def _resume(self) -> None:
        self._stalled = None
        logger.warning("steps end again")

    def _give_up(self, seconds: float) -> None:
        message = f"no step has ended for {seconds:.0f} s: the engine was given up; start the process again"
        with self._lock:
            dead = self._dead = self._dead or EngineDeadError(message)
            waiting = list(self._open)
        self._abandoned.set()
        logger.error("%s (%d requests were waiting)", message, len(waiting))
        for outlet in waiting:
            outlet(dead)


class _Outlet:
    """Where a request's outputs go: counted first, and none after the last."""

    def __init__(self, engine: AsyncEngine, emit: Emit) -> None:
        self._engine = engine
        self._emit = emit

    def __call__(self, output: RequestOutput | Exception) -> None:
        engine = self._engine
        engine._stats = engine._engine.stats()  # whoever reads the output finds it in the counts
        with engine._lock:
            if self not in engine._open:  # the engine was given up, and has gone on all the same
                return
            if isinstance(output, Exception) or output.finished:
                engine._open.discard(self)
        self._emit(output)
