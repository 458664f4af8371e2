"""``mlx-paged bench`` on a tiny model, from flags to table, JSON and plots."""

import contextlib
import importlib.util
import io
import json
import sys

import pytest

from mlx_paged_attention.api import cli

SMALL = {
    "--concurrency": ("1", "2"),
    "--input-len": ("20",),
    "--output-len": ("6",),
    "--prefix-len": ("48",),
    "--suffix-len": ("8",),
    "--prefix-requests": ("3",),
    "--prefix-output-len": ("2",),
    "--pairs": ("2",),
    "--num-blocks": ("128",),
    "--max-model-len": ("256",),
    "--max-num-seqs": ("4",),
}


def bench(model, **given):
    """Run the command with the small settings and ``given``: ``input_len="300"`` is ``--input-len 300``."""
    flags = dict(SMALL)
    for name, value in given.items():
        flags["--" + name.replace("_", "-")] = (value,) if isinstance(value, str) else value
    return cli.run(
        ["bench", "--model", str(model), *(text for flag in flags.items() for text in (flag[0], *flag[1]))]
    )


@pytest.fixture(scope="module")
def measured(tiny_model, tmp_path_factory):
    """One run of everything: its stdout, the JSON, the directory of the plots."""
    directory = tmp_path_factory.mktemp("bench")
    files = {"output_json": str(directory / "report.json"), "plot": str(directory / "plots")}
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        assert bench(tiny_model("llama"), **files) == 0
    return out.getvalue(), json.loads((directory / "report.json").read_text()), directory / "plots"


def test_the_json_has_settings_facts_and_comparisons(measured):
    _, report, _ = measured
    assert set(report) == {"version", "settings", "facts", "comparisons", "notes", "seconds"}
    assert report["version"] == 1
    assert report["settings"]["concurrency"] == [1, 2]
    assert [(one["workload"], one["setting"]["concurrency"]) for one in report["comparisons"]] == [
        ("decode", 1), ("decode", 2), ("shared-prefix", 3), ("shared-prefix", 1), ("latency", 1),
    ]  # fmt: skip
    for one in report["comparisons"]:
        assert set(one) == {"workload", "title", "setting", "pairs", "subject", "results", "ratio", "ratios"}
        for metrics in one["results"].values():
            assert metrics
            for numbers in metrics.values():
                assert len(numbers["values"]) == one["pairs"]
                assert 0 < numbers["min"] <= numbers["median"] <= numbers["max"]


def test_decode_is_measured_on_both_with_every_metric(measured):
    _, report, _ = measured
    for one in report["comparisons"][:2]:
        assert list(one["results"]) == ["ours", "mlx-lm"]
        assert set(one["results"]["ours"]) == {
            "decode_step_ms",
            "output_tokens_per_s",
            "total_tokens_per_s",
            "prefill_tokens_per_s",
            "ttft_ms",
        }
        assert one["pairs"] == 2


def test_the_report_says_on_what_it_was_measured(measured):
    _, report, _ = measured
    facts = report["facts"]
    for name in (
        "processor",
        "cores",
        "mlx",
        "mlx-lm",
        "mlx-paged-attention",
        "blas",
        "model",
        "dtype",
        "backend",
    ):
        assert facts[name], name
    assert facts["dtype"] == "float32"
    assert facts["OMP_NUM_THREADS"] == "3", "settings that change how threads share the cores are told"


def test_the_table_gives_every_number_with_its_spread(measured):
    table, report, _ = measured
    assert "### decode: 2 requests of 20 + 6 tokens at once" in table
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    values = [row for row in rows if "↓" in row or "↑" in row]
    assert len(values) == sum(len(one["results"][one["subject"]]) for one in report["comparisons"])
    for row in values:
        cells = row.split("|")[2:-1]
        assert all(" to " in cell for cell in cells), row
    assert "faster than mlx-lm" in table
    assert "relative to suffix alone" in table
    assert "mlx-lm: 0." in table


def test_plots_are_pictures_one_for_each_workload(measured):
    _, _, plots = measured
    pictures = sorted(plots.iterdir())
    assert [path.name for path in pictures] == [
        "decode.png",
        "latency.png",
        "shared-prefix-warm-prefix.png",
        "shared-prefix.png",
    ]
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_quick_run_says_how_to_run_the_full_one(tiny_model, capsys):
    assert bench(tiny_model("llama"), workload="latency", pairs="1", no_mlx_lm=()) == 0
    out, err = capsys.readouterr()
    assert "mlx-paged bench --full" in err
    assert "### latency" in out
    assert "decode:" not in out
    assert "faster than" not in out


@pytest.fixture
def error(tiny_model, capsys):
    """The one line that a bench with these flags prints."""

    def run(**given):
        status = bench(tiny_model("llama"), **given)
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        last = err.splitlines()[-1]
        assert last.startswith("mlx-paged: error: ")
        return last

    return run


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("pairs", "0", "--pairs"),
        ("output_len", "1", "--output-len"),
        ("concurrency", "0", "--concurrency"),
        ("workload", "nonsense", "nonsense"),
        ("output_json", "/nonexistent/report.json", "/nonexistent/report.json cannot be written"),
        ("llama_cpp", "/nonexistent/llama-bench", "--llama-cpp: /nonexistent/llama-bench"),
    ],
)
def test_a_bad_flag_is_told_before_anything_is_loaded(error, monkeypatch, flag, value, words):
    monkeypatch.setattr("mlx_paged_attention.bench.session.PagedEngine", None)
    assert words in error(**{flag: value})


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("concurrency", "5", "5 requests at once, the engine has 4: raise --max-num-seqs"),
        ("input_len", "300", "306 tokens per request, the engine has 256: raise --max-model-len"),
        ("num_blocks", "12", "12 blocks in the KV pool, the engine has 11: raise --kv-memory"),
    ],
)
def test_what_does_not_fit_the_engine_is_refused_with_the_flag_that_helps(error, flag, value, words):
    assert words in error(**{flag: value})


def test_plots_without_matplotlib_say_what_to_install(error, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    assert "pip install 'mlx-paged-attention[bench]'" in error(plot=str(tmp_path / "plots"))
    assert not (tmp_path / "plots").exists()


def test_a_model_that_mlx_lm_cannot_batch_is_told_with_the_way_out(error, monkeypatch):
    def fail(*_, **__):
        raise ValueError("cannot merge caches")

    monkeypatch.setattr("mlx_paged_attention.bench.batch_generator.BatchGenerator", fail)
    assert "failed (ValueError: cannot merge caches); measure without it: --no-mlx-lm" in error()


def test_a_cpu_without_numba_is_measured_too(tiny_model, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it raises
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find_spec(name, *rest)
    )
    status = bench(tiny_model("llama"), workload="latency")
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "numba is not installed" in captured.out
    assert "attention threads" not in captured.out
