"""AsyncLLM: the same engine for asyncio programs; the server is built on it."""

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Self

from mlx_paged_attention.api.llm import Message, Prompt, check_sleep_level, checked_params, make_config
from mlx_paged_attention.api.start import start_engine
from mlx_paged_attention.api.tools import ToolChoice
from mlx_paged_attention.api.turn import Turn
from mlx_paged_attention.engine.blocks_view import BlocksView
from mlx_paged_attention.engine.group import Emit, OutputKind, RequestGroup
from mlx_paged_attention.engine.outputs import EngineInfo, EngineStats, RequestOutput
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.sampling.structured_outputs import structured_outputs
from mlx_paged_attention.text.messages import continued_text
from mlx_paged_attention.text.tokenizer import Tokenizer

# Characters or token ids beyond which a prompt is prepared off the event loop: a megabyte of text
# takes a second, in which every other stream would stand still.
LONG_PROMPT = 10_000


class AsyncLLM:
    """A model on a paged KV cache, for many concurrent callers in one event loop.

    Arguments and errors are those of :class:`LLM`; the constructor blocks while the model loads.

    >>> async for output in llm.generate("Hello", SamplingParams(max_tokens=50)):
    ...     print(output.outputs[0].text)
    """

    def __init__(
        self, model: str | None = None, *, progress: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        started = start_engine(make_config(model, options), progress)
        self._engine = started.engine
        self.tokenizer: Tokenizer | None = started.tokenizer
        self.generation_config = started.generation_config
        self._running: set[RequestGroup | Emit] = set()
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._finalizer = weakref.finalize(self, started.engine.close)

    @property
    def info(self) -> EngineInfo:
        """What was loaded and how it runs."""
        return self._engine.info

    @property
    def is_alive(self) -> bool:
        """The engine serves requests."""
        return self._engine.dead_reason is None

    @property
    def dead_reason(self) -> str | None:
        """Why it does not."""
        return self._engine.dead_reason

    @property
    def stalled_reason(self) -> str | None:
        """Why it seems to hang, if it does; it may yet go on."""
        return self._engine.stalled_reason

    def stats(self) -> EngineStats:
        """Blocks, requests and cache counts after the last step."""
        return self._engine.stats()

    async def blocks(self) -> BlocksView:
        """Who holds which block, at the border of two steps; what ``GET /debug/blocks`` answers."""
        return await asyncio.to_thread(self._engine.blocks)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, yielding outputs as they come, the last one with ``finished``.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Args:
            prompt: text or token ids.
            request_id: must be unique among running requests; drawn by default.
            output_kind: ``"cumulative"`` yields everything so far, ``"delta"`` what is new,
                ``"final"`` one output at the end.

        Raises:
            InvalidRequestError, RequestTooLongError: before anything has run.
            RequestFailedError, EngineDeadError: a step raised.
        """
        outputs = _Outputs()
        request_id = request_id or uuid.uuid4().hex
        params = checked_params(sampling_params)
        await self._compile_form(params)
        prepare = partial(
            self._engine.prepare,
            request_id,
            prompt,
            params,
            kind=output_kind,
            emit=outputs.put,
        )
        takes_long = isinstance(prompt, str | list) and len(prompt) > LONG_PROMPT
        # The first budget looks through the vocabulary.
        takes_long |= bool(params.bad_words) or params.thinking_token_budget is not None
        group = await asyncio.to_thread(prepare) if takes_long else prepare()
        self._engine.start(group)
        async with aclosing(self._follow(outputs, group)) as stream:
            async for output in stream:
                yield output

    async def fork(
        self,
        request_id: str,
        sampling_params: SamplingParams | None = None,
        new_request_id: str | None = None,
        *,
        index: int = 0,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Branch a running request: another one goes on from all that it has said so far.

        Both share the blocks of what they have in common; the first to write into a partly filled one gets a
        copy of that block. What has been said until then is the new request's prompt: its ``max_tokens``
        counts from there. It is branched at a step border, as soon as this iterator is first advanced.

        Args:
            request_id: that of :meth:`generate`.
            sampling_params: the other's by default; where tokens are drawn, give another ``seed``.
            index: of its answers.

        Raises:
            InvalidRequestError, RequestTooLongError: the request is not being served (any more), or the new
                one cannot be.
            RequestFailedError, EngineDeadError: a step raised.
        """
        outputs = _Outputs()
        name = new_request_id or uuid.uuid4().hex
        params = None if sampling_params is None else checked_params(sampling_params)
        if params is not None:
            await self._compile_form(params)
        fork = self._engine.fork(request_id, name, params, index=index, kind=output_kind, emit=outputs.put)
        async with aclosing(self._follow(outputs, fork)) as stream:
            async for output in stream:
                yield output

    async def _compile_form(self, params: SamplingParams) -> None:
        """Compile the form that an answer must have beside the event loop, and before the engine asks for it.

        On a thread of its own: strangers' forms that take a second each must not keep prompts waiting.
        """
        if params.structured_outputs is None or self.tokenizer is None:
            return
        form, grammars = structured_outputs(params.structured_outputs), self.tokenizer.grammars
        if not grammars.is_known(form):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiling, grammars.compile, form)

    async def _follow(
        self, outputs: "_Outputs", request: RequestGroup | Emit
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request's outputs as they come; whoever stops reading ends it."""
        self._running.add(request)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, Exception):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            self._running.discard(request)
            if not finished:
                self._engine.abort(request)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; ``template_options`` go to the model's chat template.

        Texts are what the model writes, the markers of its reasoning included; a form begins after these.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer, and the engine has none (skip_tokenizer_init)")
        token_ids = await asyncio.to_thread(self.tokenizer.chat_token_ids, messages, **template_options)
        continues = template_options.get("continue_final_message")
        turn = Turn(
            self.tokenizer,
            ToolChoice([], []),
            checked_params(sampling_params),
            continued=continued_text(messages) if continues else None,
        )
        params = turn.params(token_ids)
        outputs = self.generate(token_ids, params, request_id, output_kind=output_kind)
        async with aclosing(outputs):  # closing this iterator must close, and so abort, that one
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with finish reason ``"abort"``."""
        self._engine.abort(request_id)

    def abort_all(self) -> int:
        """End every request that an iterator waits for, as :meth:`abort` does; how many these are."""
        for group in self._running:
            self._engine.abort(group)
        return len(self._running)

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while requests run."""
        return await asyncio.to_thread(self._engine.reset_prefix_cache)

    @property
    def is_sleeping(self) -> bool:
        """:meth:`sleep` was called, and nothing has woken the engine since."""
        return self._engine.is_sleeping

    async def sleep(self, level: int = 1) -> None:
        """As :meth:`LLM.sleep`."""
        check_sleep_level(level)
        await asyncio.to_thread(self._engine.sleep)

    async def wake_up(self) -> None:
        """As :meth:`LLM.wake_up`."""
        await asyncio.to_thread(self._engine.wake_up)

    def close(self) -> None:
        """Stop the engine; requests still running end with :class:`EngineDeadError`."""
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class _Outputs:
    """What the engine's thread says of a request, for the event loop that made this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, output: RequestOutput | Exception) -> None:
        # The loop may be closed, and its reader gone, at any moment.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, output)

    async def get(self) -> RequestOutput | Exception:
        return await self._queue.get()
