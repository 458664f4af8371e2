"""The lines about an engine and its answers."""

from dataclasses import replace

import pytest
from fake_llm import INFO

from mlx_paged_attention.api.report import cut_report, speed_report, startup_report
from mlx_paged_attention.engine.outputs import CompletionOutput, MemoryPlan, RequestMetrics, RequestOutput


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


def test_the_arithmetic_of_memory_is_shown_line_by_line() -> None:
    gib = 1 << 30
    memory = MemoryPlan("free memory of the machine", 16 * gib, 4 * gib, gib // 2, gib // 4)
    info = replace(
        INFO,
        memory=memory,
        num_blocks=257,
        start_blocks=33,
        bytes_per_token=1 << 20,
        pool_bytes=257 << 24,
        max_model_len=100_000,
    )
    lines = startup_report(info).splitlines()
    assert lines[1:8] == [
        "memory       16.0 GiB  free memory of the machine, weights included",
        "          -   4.0 GiB  weights",
        "          - 512.0 MiB  activations of a step of 64 tokens",
        "          - 256.0 MiB  at most, copies of contexts",
        "          =  11.2 GiB  left; the KV cache may take 4.0 GiB of it",
        "KV cache  256 blocks of 16 tokens (and the null block), 1.0 MiB per token, pool 528.0 MiB, which "
        "grows to 4.0 GiB as it is needed",
        "longest   a context of 4,096 tokens fits; the KV cache holds 4,096 tokens",
    ]


def test_what_takes_nothing_has_no_line_and_a_pool_of_given_blocks_does_not_grow() -> None:
    memory = MemoryPlan("the recommended working set of the GPU", 1 << 30, 1 << 28, 1 << 20, 0)
    report = startup_report(replace(INFO, memory=memory))
    assert "copies" not in report
    assert "pool 1.6 MiB\n" in report
    assert "longest   a context of 256 tokens fits; the KV cache holds 1,600 tokens" in report
