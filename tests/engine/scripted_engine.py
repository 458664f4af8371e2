"""ScriptedEngine: a real engine and scheduler over the checking fake runner, with answers by script."""

from typing import Any

import tokenizers
from fake_runner import FakeRunner
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mlx_paged_attention.config import EngineConfig
from mlx_paged_attention.engine.engine import Engine
from mlx_paged_attention.engine.group import OutputKind
from mlx_paged_attention.engine.outputs import EngineInfo, RequestOutput
from mlx_paged_attention.sampling.params import RowSampling, SamplingParams
from mlx_paged_attention.scheduler.step_plan import RowOutput, StepOutput, StepPlan, TokenLogprobs
from mlx_paged_attention.text.tokenizer import Tokenizer

VOCAB_SIZE = 256
EOS = 255


def make_info(**changes: Any) -> EngineInfo:
    values = {
        "model": "scripted",
        "backend": "cpu",
        "dtype": "float32",
        "forward": "packed rows",
        "vocab_size": VOCAB_SIZE,
        "num_blocks": 65,
        "block_size": 4,
        "bytes_per_token": 8,
        "pool_bytes": 65 * 4 * 8,
        "max_model_len": 100,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "full_length_requests": 2.56,
        "eos_token_ids": [EOS],
    }
    return EngineInfo(**{**values, **changes})


def letters() -> Tokenizer:
    """Token ``i`` is the character ``i``; 255 ends an answer and shows nothing."""
    backend = tokenizers.Tokenizer(models.WordLevel({chr(i): i for i in range(255)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    tokenizer = Tokenizer(backend, eos_token_ids=[EOS])
    assert tokenizer.encode("ab<eos>") == [97, 98, EOS]
    return tokenizer


def text_ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class ScriptedStep:
    """A step that was computed when it was launched."""

    def __init__(self, outcome: StepOutput | BaseException) -> None:
        self._outcome = outcome

    def read(self) -> StepOutput:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class ScriptedRunner:
    """Passes every plan through the fake runner and its checks.

    Attributes:
        answers: by scheduler request id, the tokens to sample; the fake's own where there are none.
        logprob: of every sampled token, by scheduler request id.
        failures: exceptions to raise in the next steps; ``None`` lets a step pass.
        fails_when_read: raise them when the step is read, not when it is launched.
        fails_rows: by scheduler request id, the position of the output token that cannot be sampled.
        runs_ahead: as a runner on a GPU says.
    """

    def __init__(self) -> None:
        self.runs_ahead = False
        self.fails_when_read = False
        self.answers: dict[str, list[int]] = {}
        self.logprob: dict[str, float] = {}
        self.failures: list[BaseException | None] = []
        self.fails_rows: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.fake: FakeRunner | None = None
        self._known: dict[str, tuple[int, RowSampling, list[int]]] = {}

    def launch(self, plan: StepPlan) -> "ScriptedStep":
        failure = self.failures.pop(0) if self.failures else None
        if failure is None:
            return ScriptedStep(self._run(plan))
        assert self.fake is not None
        self.plans.append(plan)
        self.fake.fail(plan)
        if self.fails_when_read:
            self.fake.forget(row.request_id for row in plan.rows)
            return ScriptedStep(failure)
        raise failure

    def _run(self, plan: StepPlan) -> StepOutput:
        assert self.fake is not None
        self.plans.append(plan)
        for new in plan.new:
            self._known[new.request_id] = (new.num_prompt_tokens, new.sampling, new.token_ids)
        rows = {row.request_id: row for row in self.fake.run(plan).rows}
        outputs = []
        for planned in plan.rows:
            prompt_length, sampling, tokens = self._known[planned.request_id]
            sampled = rows[planned.request_id].token_ids
            if planned.sample and planned.request_id in self.answers:
                position = planned.start + len(planned.token_ids) - prompt_length
                sampled = [self.answers[planned.request_id][position]]
                self.fake.sampled[planned.request_id] = sampled[0]
            if planned.sample and planned.request_id in self.fails_rows:
                position = planned.start + len(planned.token_ids) - prompt_length
                if position == self.fails_rows[planned.request_id]:
                    outputs.append(RowOutput(planned.request_id, [], failure="planted"))
                    continue
            logprobs = prompt_logprobs = None
            if sampling.logprobs is not None and sampled:
                value = self.logprob.get(planned.request_id, -1.0)
                logprobs = [TokenLogprobs(sampled[0], value, 2, [(7, -0.5), (8, -3.0)][: sampling.logprobs])]
            if sampling.prompt_logprobs is not None:
                first, end = planned.start + 1, planned.start + 1 + len(planned.token_ids)
                entries = [
                    TokenLogprobs(tokens[i], -float(i), 1, []) for i in range(first, min(end, prompt_length))
                ]
                prompt_logprobs = entries or None
            if sampled or prompt_logprobs is not None:
                outputs.append(RowOutput(planned.request_id, sampled, logprobs, prompt_logprobs))
        return StepOutput(plan.step, outputs)


class ScriptedEngine:
    """The engine, its runner, and every output by request id."""

    def __init__(
        self, *, tokenizer: Tokenizer | None = None, config: dict[str, Any] | None = None, **info: Any
    ):
        self.runner = ScriptedRunner()
        self.engine = Engine(
            EngineConfig(**{"seed": 0, **(config or {})}),
            make_info(**info),
            self.runner,
            "fingerprint",
            tokenizer,
        )
        self.runner.fake = FakeRunner(self.engine.info.block_size)
        self.outputs: dict[str, list[RequestOutput | Exception]] = {}

    def add(
        self,
        request_id: str,
        prompt: str | list[int],
        *,
        kind: OutputKind = "cumulative",
        answer: str | list[int] | None = None,
        **params: Any,
    ) -> None:
        if answer is not None:
            self.runner.answers[request_id] = text_ids(answer) if isinstance(answer, str) else answer
        outputs: list[RequestOutput | Exception] = []
        options = {"temperature": 0.0, "max_tokens": 8, **params}
        group = self.engine.prepare(
            request_id, prompt, SamplingParams(**options), kind=kind, emit=outputs.append
        )
        self.engine.add(group)
        self.outputs[request_id] = outputs

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.engine._cache.check()

    def run(self, limit: int = 500) -> None:
        """Until nothing is left to do; then nothing may be left over."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not come to an end"
        self.check_idle()

    def check_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
        assert stats.free_blocks == stats.num_blocks - 1
        assert not self.engine._live
        assert not self.engine._live.sequences
        assert not self.engine._in_flight

    def last(self, request_id: str) -> RequestOutput:
        """The last output; there must have been nothing after it, and no error."""
        outputs = self.outputs[request_id]
        assert all(isinstance(output, RequestOutput) for output in outputs), outputs
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1]

    def error(self, request_id: str) -> Exception:
        error = self.outputs[request_id][-1]
        assert isinstance(error, Exception)
        assert all(isinstance(o, RequestOutput) and not o.finished for o in self.outputs[request_id][:-1])
        return error
