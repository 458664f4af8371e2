"""``mlx-paged`` on a FakeLLM, as a program of its own: for terminals, signals and pipes.

Arguments: seconds per token, then the command line.
"""

import sys

from fake_llm import FakeLLM

import mlx_paged_attention.api.async_llm as home
from mlx_paged_attention.api import cli

step_time = float(sys.argv[1])


class AsyncLLM(FakeLLM):
    def __init__(self, **_: object) -> None:
        super().__init__(step_time=step_time)

    def close(self) -> None:
        last = bytes(self.prompts[-1]).decode() if self.prompts else ""
        print(f"closed; {self.aborted} aborted; last prompt {last!r}", file=sys.stderr)


home.AsyncLLM = AsyncLLM  # type: ignore[assignment,misc]
if "serve" in sys.argv:
    from mlx_paged_attention.api.server import graceful

    graceful.GRACE_SECONDS = 0.5
sys.exit(cli.run(sys.argv[2:]))
