"""FakeLLM: AsyncLLM's interface without a model. Tokens are bytes, answers are scripted, time is chosen."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mlx_paged_attention.api.llm import check_sleep_level
from mlx_paged_attention.cache.block_map import BlockRun
from mlx_paged_attention.engine.blocks_view import BlocksView, RequestView
from mlx_paged_attention.engine.outputs import (
    CompletionOutput,
    EngineInfo,
    EngineStats,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from mlx_paged_attention.errors import (
    EngineBusyError,
    EngineDeadError,
    InvalidRequestError,
    RequestTooLongError,
)
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.answer_format import AnswerFormat
from mlx_paged_attention.text.messages import normalize_messages

ANSWER = "The quick brown fox jumps over the lazy dog. "
EOS = 0
MAX_MODEL_LEN = 256

INFO = EngineInfo(
    model="fake/bytes",
    backend="cpu",
    dtype="float32",
    forward="row layout",
    vocab_size=256,
    num_blocks=101,
    block_size=16,
    bytes_per_token=1024,
    pool_bytes=101 * 16 * 1024,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    full_length_requests=6.25,
    eos_token_ids=[EOS],
)


class ByteTokenizer:
    """Every byte is a token; the template writes names, contents, tools' names and its other variables."""

    added_tokens: Mapping[str, int] = {}

    def __init__(self, answer_format: AnswerFormat | None = None, reads: tuple[str, ...] = ()) -> None:
        self.answer_format = answer_format or AnswerFormat()
        self._reads = reads

    bos_token_id, eos_token_ids, chat_template = None, (EOS,), None

    def template_reads(self, variable: str) -> bool:
        return variable in self._reads

    def answer_special_ids(self, *, tools: bool) -> tuple[int, ...]:
        return ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def piece(self, token_id: int) -> str:
        return self.token_text(token_id).replace(" ", "Ġ")

    def chat_token_ids(self, messages: Any, **template_kwargs: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **template_kwargs))

    def render_chat(self, messages: Any, **template_kwargs: Any) -> str:
        text = "".join(f"<{m['role']}>{m['content']}" for m in normalize_messages(messages))
        if tools := template_kwargs.pop("tools", None):
            template_kwargs["tools"] = ",".join(tool["function"]["name"] for tool in tools)
        if template_kwargs.pop("add_generation_prompt", True):
            text += "<assistant>"
        return text + "".join(f"[{name}={value}]" for name, value in template_kwargs.items())


class FakeLLM:
    """Answers every prompt with the same text, the first letter of answer ``i`` replaced by digit ``i``.

    Attributes:
        step_time: seconds per token; ``first_step`` those before the first.
        fail_after: tokens after which the engine dies.
        active: requests that are being answered.
        aborted: how many were ended by their reader.
        ending: all are being ended, by ``abort_all``.
        params: the sampling parameters of every request, in order.
    """

    def __init__(
        self,
        answer: str = ANSWER,
        *,
        step_time: float = 0.0,
        first_step: float = 0.0,
        fail_after: int | None = None,
        generation_config: dict[str, Any] | None = None,
        cached: Callable[[list[int]], int] = lambda ids: 0,
        tokenizer: bool | ByteTokenizer = True,
    ) -> None:
        self.info = INFO
        self.tokenizer = ByteTokenizer() if tokenizer is True else tokenizer or None
        self.generation_config = generation_config or {}
        self.step_time, self.first_step, self.fail_after = step_time, first_step, fail_after
        self.dead_reason: str | None = None
        self.stalled_reason: str | None = None
        self.active: set[str] = set()
        self.aborted = 0
        self.ending = False
        self.asleep = False
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.closed = False
        self._answer = answer
        self._cached = cached
        self._ids = itertools.count()

    @property
    def is_sleeping(self) -> bool:
        return self.asleep

    async def sleep(self, level: int = 1) -> None:
        check_sleep_level(level)
        if self.active:
            raise EngineBusyError("the engine is serving 1 request")
        self.asleep = True

    async def wake_up(self) -> None:
        self.asleep = False

    @property
    def is_alive(self) -> bool:
        return self.dead_reason is None

    def stats(self) -> EngineStats:
        used = len(self.active)
        return EngineStats(
            num_blocks=101,
            block_size=16,
            free_blocks=100 - used,
            cached_blocks=0,
            used_blocks=used,
            running=len(self.active),
            waiting=0,
            preemptions=3,
            prefix_queries=640,
            prefix_hits=320,
            pool_bytes=INFO.pool_bytes // 2,
            steps=7,
            pool_budget_bytes=INFO.pool_bytes,
            pool_growths=5,
            pool_shrinks=2,
            pool_growths_refused=1,
        )

    async def blocks(self) -> BlocksView:
        self._require_alive()
        stats, ids = self.stats(), sorted(self.active)
        held = [BlockRun(1 + i, 1, "used", (request_id,), 1) for i, request_id in enumerate(ids)]
        free = BlockRun(1 + len(ids), stats.free_blocks, "free")
        return BlocksView(
            model=INFO.model,
            stats=stats,
            shared_blocks=0,
            saved_blocks=0,
            empty_slots=4 * len(ids),
            waste=0.25 if ids else 0.0,
            hit_rate=0.5,
            recent_hit_rate=0.75,
            copies=2,
            requests=tuple(RequestView(one, "running", 1.5, 10, 3, 12, 0, 1, 4, 0) for one in ids),
            requests_left_out=0,
            runs=(BlockRun(0, 1, "null"), *held, free),
            blocks_left_out=0,
        )

    def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> "FakeLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def abort(self, request_id: str) -> None:
        self.active.discard(request_id)

    def abort_all(self) -> int:
        self.ending = True
        return len(self.active)

    async def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        output_kind: Literal["cumulative", "delta", "final"] = "cumulative",
        **template_kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        assert self.tokenizer is not None
        ids = self.tokenizer.chat_token_ids(messages, **template_kwargs)
        outputs = self.generate(ids, sampling_params, request_id, output_kind=output_kind)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        output_kind: Literal["cumulative", "delta", "final"] = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        self._require_alive()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("this engine takes token ids only", "prompt")
            text, ids = prompt, self.tokenizer.encode(prompt)
        else:
            text, ids = None, prompt
        if any(not 0 <= token_id < 256 for token_id in ids):
            raise InvalidRequestError("prompt: token ids must lie in [0, 256)", "prompt")
        if any(token_id >= 256 for token_id in sampling_params.logit_bias or ()):
            raise InvalidRequestError("logit_bias: token ids must lie in [0, 256)", "logit_bias")
        room = MAX_MODEL_LEN - len(ids)
        if room < 1:
            raise RequestTooLongError(
                f"the prompt is too long: it has {len(ids)} tokens, at most {MAX_MODEL_LEN - 1} fit", "prompt"
            )
        self.params.append(sampling_params)
        self.prompts.append(ids)
        request_id = request_id or f"fake-{next(self._ids)}"
        self.active.add(request_id)
        finished = False
        try:
            async for output in self._steps(request_id, text, ids, sampling_params, room):
                finished = output.finished
                if output_kind != "final" or finished:
                    yield self._shown(output, output_kind)
        finally:
            self.active.discard(request_id)
            self.aborted += not finished

    async def _steps(
        self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, room: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative outputs, one per token."""
        arrival = time.monotonic()
        await asyncio.sleep(self.first_step)
        first = time.monotonic()
        limit = min(params.max_tokens or room, room)
        script = (self._answer * (1 + limit // len(self._answer))).encode()
        ends = not params.ignore_eos and len(self._answer) < limit
        count = len(self._answer) if ends else limit
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(_entries(token, params.prompt_logprobs) for token in ids[1:])]
        for length in range(1, count + 1):
            if length > 1:
                await asyncio.sleep(self.step_time)
            if self.fail_after is not None and length > self.fail_after:
                self.dead_reason = "scripted failure"
            self._require_alive()
            done = length == count or self.ending
            reason = "abort" if self.ending else "stop" if ends else "length"
            answers = []
            for index in range(params.n):
                tokens = [ord(str(index)), *script[1:length]]
                answers.append(
                    CompletionOutput(
                        index=index,
                        text=bytes(tokens).decode(errors="ignore"),
                        token_ids=tokens,
                        logprobs=None
                        if params.logprobs is None
                        else [_entries(token, params.logprobs) for token in tokens],
                        finish_reason=reason if done else None,
                    )
                )
            yield RequestOutput(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=ids,
                outputs=answers,
                num_cached_tokens=self._cached(ids),
                metrics=RequestMetrics(arrival, first, first, time.monotonic() if done else None),
                finished=done,
                prompt_logprobs=prompt_logprobs,
            )
            if done:
                return

    def _shown(self, output: RequestOutput, kind: str) -> RequestOutput:
        if kind != "delta":
            return output
        length = len(output.outputs[0].token_ids)
        deltas = []
        for answer in output.outputs:
            before = bytes(answer.token_ids[:-1]).decode(errors="ignore")
            deltas.append(
                replace(
                    answer,
                    text=answer.text[len(before) :],
                    token_ids=answer.token_ids[-1:],
                    logprobs=None if answer.logprobs is None else answer.logprobs[-1:],
                )
            )
        return replace(
            output, outputs=deltas, prompt_logprobs=output.prompt_logprobs if length == 1 else None
        )

    def _require_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead_reason}")


def _entries(token: int, alternatives: int) -> dict[int, Logprob]:
    """The token itself is the second most likely; the others follow its number."""
    others = [(token + step) % 256 for step in range(1, alternatives + 1)]
    ranked = [*others[:1], token, *others[1:]]
    return {
        t: Logprob(-0.5 * rank, rank, bytes([t]).decode(errors="replace")) for rank, t in enumerate(ranked, 1)
    }
