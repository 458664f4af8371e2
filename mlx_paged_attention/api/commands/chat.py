"""``mlx-paged chat``: a conversation at the terminal, or on a pipe."""

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mlx_paged_attention.api.commands.flags import (
    DEFAULT_ENGINE,
    DEFAULT_SAMPLING,
    EngineFlags,
    SamplingFlags,
    loaded,
    say,
)
from mlx_paged_attention.api.defaults import sampling_defaults
from mlx_paged_attention.api.report import cut_report, speed_report
from mlx_paged_attention.engine.outputs import RequestOutput
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams

if TYPE_CHECKING:
    from mlx_paged_attention.api.async_llm import AsyncLLM

with contextlib.suppress(ImportError):  # some Pythons come without
    import readline  # noqa: F401  # gives input() line editing and a history

# Greedy as mlx-lm's chat; an answer may fill the context.
_DEFAULTS = {"temperature": 0.0, "max_tokens": None}

EXAMPLES = """Examples:

    mlx-paged chat
    mlx-paged chat --system-prompt "Answer in one sentence." --temperature 0.7
    echo "What is a block table?" | mlx-paged chat
"""


def chat(
    *,
    system_prompt: Annotated[str | None, Parameter(help="First message, in the system's role.")] = None,
    engine: EngineFlags = DEFAULT_ENGINE,
    sampling: SamplingFlags = DEFAULT_SAMPLING,
) -> None:
    """Talk with a model. The conversation is kept, and its prefix in the KV cache.

    /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer. On a pipe, every line of
    stdin is a message.
    """
    options = engine.options(text=True)
    sampling.params(_DEFAULTS)  # a bad flag is told before the model is loaded
    with loaded(options) as llm, asyncio.Runner() as runner:
        params = sampling.params(_DEFAULTS | sampling_defaults(llm.generation_config))
        conversation = _Conversation(llm, params, system_prompt)
        if sys.stdin.isatty():
            say("Say something; /clear forgets, /exit leaves, Ctrl-C stops an answer.")
        while (line := _read_line()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/clear":
                    conversation.clear()
                case text:
                    _take_turn(runner, conversation, text)


def _read_line() -> str | None:
    """The next line of stdin, ``None`` at the end of input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    prompt = "> "
    if not sys.stdout.isatty():  # then stdout takes answers only
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        say("")
        return None


def _take_turn(runner: asyncio.Runner, conversation: "_Conversation", text: str) -> None:
    try:
        runner.run(conversation.say(text))
    except KeyboardInterrupt:
        print(flush=True)
        say("stopped")
    except InvalidRequestError as error:
        if not sys.stdin.isatty():
            raise
        say(f"{error} (/clear starts over)")


class _Conversation:
    """The messages so far."""

    def __init__(self, llm: "AsyncLLM", params: SamplingParams, system_prompt: str | None) -> None:
        self._llm = llm
        self._params = params
        self._head = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._messages: list[dict[str, Any]] = list(self._head)

    def clear(self) -> None:
        self._messages = list(self._head)

    async def say(self, text: str) -> None:
        """Put a message and print the answer as it comes. Stopped, what was said so far stays said."""
        question = {"role": "user", "content": text}
        started = time.monotonic()
        last: RequestOutput | None = None
        shown = ""
        try:
            async for last in self._llm.chat([*self._messages, question], self._params):
                print(last.outputs[0].text[len(shown) :], end="", flush=True)
                shown = last.outputs[0].text
            print(flush=True)
        finally:
            if shown:
                self._messages += [question, {"role": "assistant", "content": shown}]
        assert last is not None
        say(
            speed_report(
                len(last.prompt_token_ids),
                last.num_cached_tokens,
                len(last.outputs[0].token_ids),
                time.monotonic() - started,
            )
        )
        if cut := cut_report([last], self._params.max_tokens, self._llm.info):
            say(cut)
