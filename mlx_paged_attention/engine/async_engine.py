"""AsyncEngine: the one thread that owns MLX, and the way in and out of it."""

import contextlib
import queue
import threading
from collections.abc import Callable

from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.engine import Emit, Engine
from mlx_paged_attention.engine.group import OutputKind, RequestGroup
from mlx_paged_attention.engine.mlx_thread import run_on_mlx_thread
from mlx_paged_attention.engine.outputs import EngineInfo, EngineStats, RequestOutput
from mlx_paged_attention.errors import EngineDeadError, InvalidRequestError
from mlx_paged_attention.models.source import ModelSource
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.tokenizer import Tokenizer

Progress = Callable[[str], None]
_Command = Callable[[], None]


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
        return self._engine.prepare(request_id, prompt, params, kind=kind, emit=self._counted(emit))

    def fork(
        self,
        parent_id: str,
        request_id: str,
        params: SamplingParams | None,
        *,
        index: int,
        kind: OutputKind,
        emit: Emit,
    ) -> None:
        """Begin a request that goes on from what answer ``index`` of another has said so far.

        Args:
            emit: as for :meth:`prepare`; an ``InvalidRequestError`` comes this way, too.

        Raises:
            EngineDeadError: the engine no longer serves.
        """
        counted = self._counted(emit)

        def begin() -> None:
            if self._dead is not None:
                counted(self._dead)
                return
            try:
                self._engine.fork(parent_id, request_id, params, index=index, kind=kind, emit=counted)
            except InvalidRequestError as error:
                counted(error)

        self._send(begin)

    def _counted(self, emit: Emit) -> Emit:
        def counted(output: RequestOutput | Exception) -> None:
            self._stats = self._engine.stats()  # whoever reads the output finds it in the counts
            emit(output)

        return counted

    def start(self, group: RequestGroup) -> None:
        """Queue a prepared request.

        Raises:
            EngineDeadError: the engine no longer serves.
        """
        self._send(lambda: self._add(group))

    def abort(self, request: str | RequestGroup) -> None:
        """End a request at the next step border; its ``emit`` gets a last output.

        Whoever gives up waiting names the request itself: its id may belong to another.
        """
        # A dead engine has already ended every request.
        with contextlib.suppress(EngineDeadError):
            self._send(lambda: self._engine.abort(request))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False while requests hold blocks."""
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._send(lambda: answer.put(self._engine.reset_prefix_cache()))
        return answer.get()

    def close(self) -> None:
        """Stop the thread; requests still being served get an :class:`EngineDeadError`."""
        self._closing = True
        self._commands.put(lambda: None)
        # Garbage collection may close an engine from that engine's own thread.
        if threading.get_ident() != self._thread_id:
            self._ended.wait()

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

            loaded = load_engine(config, source, progress)
            engine = Engine(config, loaded.info, loaded.runner, loaded.fingerprint, tokenizer)
        except BaseException as error:
            self._started.put(error)
            return
        self._started.put(engine)
        cause: BaseException | None = None
        try:
            self._serve(engine)
            message = "the engine was closed"
        except BaseException as error:
            cause = error
            message = f"the engine stopped after {type(error).__name__}: {error}"
        dead = EngineDeadError(message)
        dead.__cause__ = cause
        with self._lock:
            self._dead = dead
        # Closed before the last commands run: they find no request in books that may no longer agree.
        engine.close(dead)
        self._drain()  # nothing more can be sent; what was is answered
        self._stats = engine.stats()

    def _serve(self, engine: Engine) -> None:
        while not self._closing:
            if not engine.has_work:
                self._commands.get()()
            self._drain()
            if engine.has_work and not self._closing:
                engine.step()
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

    def _send(self, command: _Command) -> None:
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(str(self._dead)) from self._dead.__cause__
            self._commands.put(command)
