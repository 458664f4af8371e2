"""ScriptedLLM: a FakeLLM whose answers are given, piece by piece, for a model with a given answer format."""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from fake_llm import ByteTokenizer, FakeLLM

from mlx_paged_attention.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from mlx_paged_attention.sampling.params import SamplingParams
from mlx_paged_attention.text.answer_format import AnswerFormat, find_format

# As Qwen 3 writes: reasoning in <think>, Hermes calls.
HERMES = find_format("{{ tools }}<tool_call>", {"<think>", "</think>"}, offers_tools=True)


class ScriptedLLM(FakeLLM):
    """Its answer comes in the given pieces, one per step."""

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        answer_format: AnswerFormat = HERMES,
        reads: tuple[str, ...] = ("tools",),
        finish_reason: str = "stop",
        stop_reason: str | None = None,
    ) -> None:
        super().__init__(tokenizer=ByteTokenizer(answer_format, reads))
        self._pieces = list(pieces)
        self._finish_reason, self._stop_reason = finish_reason, stop_reason

    async def _steps(
        self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, room: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative outputs, one per piece."""
        begun = time.monotonic()
        for count in range(1, len(self._pieces) + 1):
            done = count == len(self._pieces)
            said = "".join(self._pieces[:count])
            answers = [
                CompletionOutput(
                    index=index,
                    text=said,
                    token_ids=list(said.encode()),
                    finish_reason=self._finish_reason if done else None,
                    stop_reason=self._stop_reason if done else None,
                )
                for index in range(params.n)
            ]
            metrics = RequestMetrics(begun, begun, begun, time.monotonic() if done else None)
            yield RequestOutput(request_id, text, ids, answers, 0, metrics, done)

    def _shown(self, output: RequestOutput, kind: str) -> RequestOutput:
        if kind != "delta":
            return output
        said = output.outputs[0].text
        count = next(n for n in range(1, len(self._pieces) + 1) if "".join(self._pieces[:n]) == said)
        old = len("".join(self._pieces[: count - 1]))
        new: list[Any] = [
            replace(answer, text=said[old:], token_ids=list(said[old:].encode())) for answer in output.outputs
        ]
        return replace(output, outputs=new)
