"""``mlx-paged generate``: continue prompts, all of them at once."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

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

# As mlx-lm's own command line: the likeliest tokens, and enough of them for a paragraph.
_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}

EXAMPLES = """Examples:

    mlx-paged generate "The capital of France is"
    mlx-paged generate --chat "Name three rivers." --max-tokens 60
    mlx-paged generate "Roses are" "Violets are" --temperature 0.8 --n 2
    mlx-paged generate --model mlx-community/Qwen3-0.6B-4bit < prompt.txt
    mlx-paged generate -- "- Item one"
"""


def generate(
    *prompts: Annotated[str, Parameter(help="Texts to continue; without any, stdin is one.", env_var=[])],
    chat: Annotated[
        bool,
        Parameter(help="Put each prompt to the model as a user's message.", negative="", show_default=False),
    ] = False,
    n: Annotated[int, Parameter(help="Answers per prompt.")] = 1,
    engine: EngineFlags = DEFAULT_ENGINE,
    sampling: SamplingFlags = DEFAULT_SAMPLING,
) -> None:
    """Continue one or several prompts; the answer goes to stdout, everything else to stderr.

    Without --temperature the likeliest tokens are taken, unless the model's configuration asks otherwise.
    """
    # What is wrong with them is told before the model is loaded.
    options = engine.options(text=True)
    sampling.params(_DEFAULTS, n=n)
    texts = list(prompts) or [_read_stdin()]
    for number, text in enumerate(texts, 1):
        if not text:
            which = "the prompt" if len(texts) == 1 else f"prompt {number}"
            raise InvalidRequestError(f"{which} is empty: there is nothing to continue", "prompt")
    with loaded(options) as llm:
        params = sampling.params(_DEFAULTS | sampling_defaults(llm.generation_config), n=n)
        asyncio.run(_answer(llm, texts, params, chat))


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise InvalidRequestError('give a prompt, as in: mlx-paged generate "The capital of France is"')
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise InvalidRequestError("no prompt was given and stdin is empty")
    return text


async def _answer(llm: "AsyncLLM", texts: list[str], params: SamplingParams, chat: bool) -> None:
    started = time.monotonic()
    if len(texts) == 1 and params.n == 1:
        outputs = [await _stream(_outputs(llm, texts[0], params, chat))]
    else:
        running = [asyncio.create_task(_last(_outputs(llm, text, params, chat))) for text in texts]
        outputs = []
        for number, task in enumerate(running, 1):
            outputs.append(await task)
            _print_labelled(number, texts[number - 1], outputs[-1])
    say(
        speed_report(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
            sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
            time.monotonic() - started,
        )
    )
    if cut := cut_report(outputs, params.max_tokens, llm.info):
        say(cut)


def _outputs(llm: "AsyncLLM", text: str, params: SamplingParams, chat: bool) -> AsyncIterator[RequestOutput]:
    if chat:
        return llm.chat([{"role": "user", "content": text}], params)
    return llm.generate(text, params)


async def _stream(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Print an answer as it comes; its last output."""
    shown = 0
    async for output in outputs:
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(flush=True)
    return output


async def _last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        last = output
    return last


def _print_labelled(number: int, text: str, output: RequestOutput) -> None:
    for answer in output.outputs:
        label = (
            f"prompt {number}" if len(output.outputs) == 1 else f"prompt {number}, answer {answer.index + 1}"
        )
        start = " ".join(text.split())
        print(f"=== {label}: {start if len(start) <= 60 else start[:59] + '…'}")
        print(answer.text, end="\n\n", flush=True)
