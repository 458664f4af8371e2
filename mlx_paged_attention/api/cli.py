"""``mlx-paged``: the command line. Each command lies in ``commands/``; here they are put together."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError
from cyclopts.config import Env

from mlx_paged_attention import __version__
from mlx_paged_attention.api.commands import bench, chat, doctor, generate, serve
from mlx_paged_attention.errors import MlxPagedError

_HELP = """High-throughput LLM inference for MLX on a paged KV cache.

Every flag can also be set in the environment: --max-model-len as MLX_PAGED_MAX_MODEL_LEN. A flag on the
command line counts more. `mlx-paged COMMAND --help` shows a command's flags and examples.
"""

app = App(
    name="mlx-paged",
    help=_HELP,
    version=__version__,
    config=Env("MLX_PAGED_", command=False, show=False),
)
app.command(generate.generate, help_epilogue=generate.EXAMPLES)
app.command(chat.chat, help_epilogue=chat.EXAMPLES)
app.command(serve.serve, help_epilogue=serve.EXAMPLES)
app.command(bench.bench, help_epilogue=bench.EXAMPLES)
app.command(doctor.doctor, help_epilogue=doctor.EXAMPLES)


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit status: 0, 1 (doctor found a problem), 2 (an error, told in one line)."""
    try:
        command, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
        return command(*bound.args, **bound.kwargs) or 0
    except (CycloptsError, MlxPagedError) as error:
        print(f"mlx-paged: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read us has left (`| head`). Python would complain while flushing stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
