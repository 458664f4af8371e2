"""``mlx-paged``: the command line. Each command lies in ``commands/``; here they are put together."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError, UnknownOptionError, UnusedCliTokensError
from cyclopts.config import Env

from mlx_paged_attention import __version__
from mlx_paged_attention.api.commands import bench, chat, doctor, generate, inspect, serve, top
from mlx_paged_attention.api.commands.flags import say
from mlx_paged_attention.api.commands.settings import OTHER_VARIABLES, PREFIX, Settings
from mlx_paged_attention.engine.mlx_thread import has_busy_thread
from mlx_paged_attention.errors import InvalidRequestError, MlxPagedError

_HELP = """High-throughput LLM inference for MLX on a paged KV cache.

Every flag can also be set in the environment: --max-model-len as MLX_PAGED_MAX_MODEL_LEN. A flag on the
command line counts more. `mlx-paged COMMAND --help` shows a command's flags and examples.

MLX_PAGED_CACHE names the directory for what is fetched or made once (the default model, a BLAS);
MLX_PAGED_BLAS=off keeps MLX's own BLAS on a Linux CPU.
"""

app = App(
    name="mlx-paged",
    help=_HELP,
    version=__version__,
    config=Env(PREFIX, command=False, show=False),
)
app.command(generate.generate, help_epilogue=generate.EXAMPLES)
app.command(chat.chat, help_epilogue=chat.EXAMPLES)
app.command(serve.serve, help_epilogue=serve.EXAMPLES)
app.command(top.top, help_epilogue=top.EXAMPLES)
app.command(bench.bench, help_epilogue=bench.EXAMPLES)
app.command(inspect.inspect, help_epilogue=inspect.EXAMPLES)
app.command(doctor.doctor, help_epilogue=doctor.EXAMPLES)
_COMMANDS = ("generate", "chat", "serve", "top", "bench", "inspect", "doctor")


def main() -> NoReturn:
    """The console script."""
    try:
        sys.exit(run(sys.argv[1:]))
    except SystemExit as end:
        if has_busy_thread():
            # Interrupted while a model is loaded: MLX does not stop in the middle, and a thread inside of it
            # would abort an interpreter that shuts down.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status: 0, 1 (doctor found a problem), 2 (an error, told in one line)."""
    _warn_of_unknown_variables()
    try:
        command, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
        return command(*bound.args, **bound.kwargs) or 0
    except UnknownOptionError as error:
        return _refuse(f"{error}{_prompt_hint(error, arguments)}")
    except UnusedCliTokensError as error:
        name, extra = " ".join(error.command_chain or ()), " ".join(error.unused_tokens or ())
        return _refuse(f"{name} does not take {extra!r}; see mlx-paged {name} --help")
    except InvalidRequestError as error:
        return _refuse(Settings(app, _COMMANDS).in_own_words(error, arguments, os.environ))
    except (CycloptsError, MlxPagedError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read us has left (`| head`). Python would complain while flushing stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _refuse(message: str) -> int:
    say(f"mlx-paged: error: {' '.join(message.split())}")
    return 2


def _prompt_hint(error: UnknownOptionError, arguments: Sequence[str]) -> str:
    """What to do where a prompt was taken for a flag, unless it looks like a mistyped one."""
    text = error.token.keyword or error.token.value
    if list(arguments[:1]) != ["generate"] or re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", text, re.DOTALL):
        return ""
    return ' (flags first, then -- before a prompt that begins with "-", as in: generate -- "-5 degrees")'


def _warn_of_unknown_variables() -> None:
    if not any(name.startswith(PREFIX) and name not in OTHER_VARIABLES for name in os.environ):
        return
    if unknown := Settings(app, _COMMANDS).unknown_variables(os.environ):
        say(f"mlx-paged: warning: nothing reads {', '.join(unknown)}; see mlx-paged --help")
