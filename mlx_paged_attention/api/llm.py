"""LLM: the in-process API for scripts and notebooks."""

import queue
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from tqdm.auto import tqdm

from mlx_paged_attention.api.answers import Answers
from mlx_paged_attention.api.report import counted
from mlx_paged_attention.api.start import start_engine
from mlx_paged_attention.api.tools import tool_choice_of
from mlx_paged_attention.api.turn import Turn
from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.blocks_view import BlocksView
from mlx_paged_attention.engine.outputs import EngineInfo, EngineStats, RequestOutput
from mlx_paged_attention.errors import InvalidRequestError
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.messages import continued_text
from mlx_paged_attention.text.tokenizer import Tokenizer

Prompt = str | list[int]
Message = dict[str, Any]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model on a paged KV cache, in this process.

    >>> llm = LLM()
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

    Takes the fields of :class:`EngineConfig` as keyword arguments. Loading happens here and may
    take a while; :meth:`close` (or leaving a ``with`` block) gives the memory back. May be used
    from any thread.

    Args:
        model: Hugging Face repo id, MLX model directory, ``.gguf`` path; ``None`` is SmolLM2-135M.
        progress: called with a line per stage of loading; also switches download bars on.

    Raises:
        ModelLoadError, UnsupportedModelError: the model cannot be loaded.
        InvalidRequestError: an option is out of range.
    """

    def __init__(
        self, model: str | None = None, *, progress: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        started = start_engine(make_config(model, options), progress)
        self._engine = started.engine
        self.tokenizer: Tokenizer | None = started.tokenizer
        self.generation_config = started.generation_config
        self._finalizer = weakref.finalize(self, started.engine.close)

    @property
    def info(self) -> EngineInfo:
        """What was loaded and how it runs."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts; all run together, results come in the prompts' order.

        Args:
            prompts: a string, a list of strings, a list of token ids, or a list of such lists.
            sampling_params: one for all or one per prompt; ``SamplingParams()`` by default.
            use_tqdm: show a progress bar on a terminal if it takes more than a moment.

        Raises:
            InvalidRequestError, RequestTooLongError: a prompt or its parameters cannot be served;
                nothing has been run.
            RequestFailedError, EngineDeadError: a step raised.
        """
        many = _several(prompts)
        params = _one_each(sampling_params, len(many))
        results: queue.SimpleQueue[tuple[int, RequestOutput | Exception]] = queue.SimpleQueue()
        groups = []
        for index, (prompt, one) in enumerate(zip(many, params, strict=True)):
            emit = _numbered(results, index)
            try:
                groups.append(self._engine.prepare(uuid.uuid4().hex, prompt, one, kind="final", emit=emit))
            except InvalidRequestError as error:
                if len(many) > 1:
                    error.args = (f"prompt {index}: {error}",)
                raise
        outputs: dict[int, RequestOutput] = {}
        try:
            for group in groups:
                self._engine.start(group)
            for index, output in _collect(results, len(groups), use_tqdm):
                outputs[index] = output
        finally:
            for index, group in enumerate(groups):
                if index not in outputs:
                    self._engine.abort(group)
        return [outputs[index] for index in range(len(groups))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations.

        Each answer's ``text`` is what the model wrote; its ``chat`` has reasoning, content and calls apart.

        Args:
            messages: dicts with ``role`` and ``content``.
            tools: functions that may be called, as OpenAI's API writes them; so is ``tool_choice``.
            template_options: passed to the model's chat template.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template; else as
                :meth:`generate`.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer, and the engine has none (skip_tokenizer_init)")
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise InvalidRequestError(
                f"messages must be a list of messages, or a list of such lists, not {_type(messages)}",
                "messages",
            )
        if not messages:
            raise InvalidRequestError("there are no messages to answer", "messages")
        single = isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        choice = tool_choice_of(tools, tool_choice, self.tokenizer)
        if choice.offered:
            template_options["tools"] = choice.offered
        prompts = [self.tokenizer.chat_token_ids(one, **template_options) for one in conversations]
        turns = [
            Turn(
                self.tokenizer,
                choice,
                params,
                continued=continued_text(one) if template_options.get("continue_final_message") else None,
            )
            for one, params in zip(conversations, _one_each(sampling_params, len(conversations)), strict=True)
        ]
        params = [turn.params(prompt) for turn, prompt in zip(turns, prompts, strict=True)]
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm)
        return [_read(turn.answers, output) for turn, output in zip(turns, outputs, strict=True)]

    def stats(self) -> EngineStats:
        """Blocks, requests and cache counts after the last step."""
        return self._engine.stats()

    def blocks(self) -> BlocksView:
        """Who holds which block, at the border of two steps; what ``GET /debug/blocks`` answers."""
        return self._engine.blocks()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing done, while requests run."""
        return self._engine.reset_prefix_cache()

    @property
    def is_sleeping(self) -> bool:
        """:meth:`sleep` was called, and nothing has woken the engine since."""
        return self._engine.is_sleeping

    def sleep(self, level: int = 1) -> None:
        """Give the KV pool's memory back; the weights stay, cached prefixes are forgotten.

        :meth:`wake_up` or the next request ends the sleep, and the pool grows again as it is needed.

        Raises:
            InvalidRequestError: another level.
            EngineBusyError: requests are being served.
            PoolMemoryError: there is no memory for a smaller pool beside this one; it stays as it is.
        """
        check_sleep_level(level)
        self._engine.sleep()

    def wake_up(self) -> None:
        """End :meth:`sleep` before a request does; nothing if the engine is awake.

        Raises:
            PoolMemoryError: there is no memory for a pool now.
        """
        self._engine.wake_up()

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    """EngineConfig from keyword arguments.

    Raises:
        InvalidRequestError: an unknown option, named, or a value out of range.
    """
    known = {name for name in EngineConfig.__slots__ if name != "model"}
    if unknown := sorted(set(options) - known):
        raise InvalidRequestError(
            f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}", unknown[0]
        )
    return EngineConfig(model=model, **options)


def check_sleep_level(level: int) -> None:
    """Only level 1 of vLLM's: weights stay, as there is no other memory to put them into.

    Raises:
        InvalidRequestError: another one.
    """
    if level != 1:
        raise InvalidRequestError(
            f"level must be 1 (give the KV pool's memory back), not {level}; to give the weights back, too, "
            "stop the server or close the LLM",
            "level",
        )


def checked_params(params: Any) -> SamplingParams:
    """The parameters, or the defaults for ``None``.

    Raises:
        InvalidRequestError: something else than ``SamplingParams``.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params must be a SamplingParams, not {_type(params)}", "sampling_params"
        )
    return params


def _several(prompts: Any) -> list[Any]:
    """One prompt or several, as several; the engine checks each of them."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            "prompts must be a string, a list of token ids, or a list of strings or of lists of token ids, "
            f"not {_type(prompts)}",
            "prompt",
        )
    single = len(prompts) > 0 and isinstance(prompts[0], int | float)
    return [prompts] if single else list(prompts)


def _one_each(params: Any, count: int) -> list[SamplingParams]:
    if isinstance(params, str) or not isinstance(params, Sequence):
        return [checked_params(params)] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling_params for {counted(count, 'prompt')}; give one for all or one for each",
            "sampling_params",
        )
    return [checked_params(one) for one in params]


def _read(answers: Answers, output: RequestOutput) -> RequestOutput:
    return replace(output, outputs=[replace(one, chat=answers.whole(output, one)) for one in output.outputs])


def _type(value: object) -> str:
    return type(value).__name__


def _numbered(
    results: "queue.SimpleQueue[tuple[int, RequestOutput | Exception]]", index: int
) -> Callable[[RequestOutput | Exception], None]:
    return lambda output: results.put((index, output))


def _collect(
    results: "queue.SimpleQueue[tuple[int, RequestOutput | Exception]]", count: int, use_tqdm: bool
) -> Iterator[tuple[int, RequestOutput]]:
    """The ``count`` last outputs as they come, behind a progress bar."""
    tokens = 0
    # Only on a terminal, and only once it has taken longer than a person waits without wondering.
    with tqdm(total=count, unit="req", delay=2.0, disable=None if use_tqdm else True) as bar:
        for _ in range(count):
            index, output = results.get()
            if isinstance(output, Exception):
                raise output
            tokens += sum(len(answer.token_ids) for answer in output.outputs)
            if not bar.disable:
                rate = tokens / max(bar.format_dict["elapsed"], 1e-6)
                bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
            bar.update()
            yield index, output
