"""GrammarChecker: finds out in bounded time and memory whether a grammar can be used."""

import json
import selectors
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.structured_outputs import FIELD

_WORKER = Path(__file__).with_name("grammar_worker.py")

# A thousand times what an ordinary schema takes.
SECONDS = 1.0
_SECONDS_TO_START = 30.0


class GrammarChecker:
    """Compiles grammars of strangers in a process beside this one, before they are compiled in it.

    The compiler's own limits leave gaps (a ``multipleOf`` of 99,999,999 builds as many states), and nothing
    in this process could stop it. The other process is started by the first grammar, and killed and started
    again when one takes too long.

    Args:
        special_tokens: texts of the special tokens, by id, which grammars may name.
        limits: of the compiler, keyword arguments of ``LLParserLimits``.
    """

    def __init__(self, special_tokens: Mapping[int, str], limits: dict[str, Any]) -> None:
        self._special_tokens = list(special_tokens.items())
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def check(self, source: str) -> str | None:
        """Why the grammar cannot be used, or ``None``. Waits for checks of other threads.

        Raises:
            InvalidRequestError: no such process can be started here.
        """
        with self._lock:
            if self._process is None:
                self._start()
            answer = self._ask([source, self._limits], SECONDS)
            if answer is None:
                self._kill()
                return f"it is too complex: it takes more than {SECONDS:g} s or too much memory to compile"
            return answer or None

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # an interrupt from the keyboard is for this process
        )
        self._finalizer = weakref.finalize(self, _end, process)
        if self._ask(self._special_tokens, _SECONDS_TO_START) is None:
            self._kill()
            raise InvalidRequestError(
                f"{FIELD}: the process that checks grammars does not start here; leave it out", FIELD
            )

    def _ask(self, question: Any, seconds: float) -> str | None:
        """The worker's answer; ``None`` if it has none in time, or has died."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        try:
            line = memoryview(json.dumps(question).encode() + b"\n")
            while line:  # the worker reads a line before it does anything
                line = line[self._process.stdin.write(line) :]
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while not answer.endswith(b"\n"):
                    part = self._process.stdout.read(1 << 16) if selector.select(seconds) else b""
                    if not part:
                        return None
                    answer += part
        except BrokenPipeError:
            return None
        return str(json.loads(answer))

    def _kill(self) -> None:
        assert self._finalizer is not None
        self._finalizer()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    process.wait()
