"""The lines about an engine and its answers."""

from dataclasses import replace

import pytest
from fake_llm import INFO

from mlx_paged_attention.api.report import cut_report, speed_report, startup_report
from mlx_paged_attention.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput


def output(*answers: tuple[int, str]) -> RequestOutput:
    """A request whose answers have so many tokens and ended so."""
    outputs = [
        CompletionOutput(index, "", [7] * count, finish_reason=reason)
        for index, (count, reason) in enumerate(answers)
    ]
    return RequestOutput("r", None, [1], outputs, 0, RequestMetrics(0.0), finished=True)


def test_one_of_a_kind_is_singular() -> None:
    info = replace(
        INFO, num_blocks=2, block_size=1, max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1
    )
    report = startup_report(info)
    assert "1 block of 1 token (and the null block), " in report
    assert "up to 1 token each" in report
    assert "up to 1 request and 1 token each" in report
    assert speed_report(1, 0, 2, 1.0) == "1 prompt token, 2 generated in 1.0 s: 2.0 tokens/s"
    assert speed_report(2, 1, 2, 1.0).startswith("2 prompt tokens (1 cached), ")


@pytest.mark.parametrize(
    ("answers", "num_blocks", "line"),
    [
        ([(5, "stop")], 101, None),
        ([(5, "length")], 101, "stopped at --max-tokens 5"),
        ([(4, "length")], 101, "stopped at max_model_len 256"),
        ([(4, "length")], 3, "stopped at 32 tokens, which fill the KV cache"),
        ([(5, "stop"), (5, "length")], 101, "1 of 2 answers stopped at --max-tokens 5"),
        (
            [(4, "length"), (3, "stop"), (5, "length"), (5, "length")],
            101,
            "3 of 4 answers stopped at max_model_len 256 or --max-tokens 5",
        ),
    ],
)
def test_what_cut_answers_short_is_named(
    answers: list[tuple[int, str]], num_blocks: int, line: str | None
) -> None:
    assert cut_report([output(*answers)], 5, replace(INFO, num_blocks=num_blocks)) == line
    assert cut_report([output(one) for one in answers], 5, replace(INFO, num_blocks=num_blocks)) == line
