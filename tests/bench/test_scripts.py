"""The scripts in benchmarks/ run, and still find what they wrap."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Run a script's main with arguments; its module."""

    def run(name, *arguments):
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main()
        return module

    return run


def test_the_step_profile_accounts_for_the_whole_step(script, tiny_model, capsys):
    from mlx_paged_attention.ops import host

    kernel = host.attend_rows
    module = script(
        "step_profile", "--model", tiny_model("llama"), "--rows", 1, 3, "--context", 40, "--steps", 5
    )
    assert host.attend_rows is kernel, "still wrapped"
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if line.startswith("| ")}
    assert set(module.PARTS) < set(rows)
    for column in (0, 2):
        for part in module.PARTS:
            assert float(rows[part][column]) >= 0, part
        # Medians of parts do not add up to the median of sums, but nearly.
        total = sum(float(rows[part][column + 1].strip(" %")) for part in module.PARTS)
        assert 60 < total < 140
    assert float(rows[module.KERNEL][0]) == 0, "one row attends within MLX's graph"
    assert float(rows[module.KERNEL][2]) > 0
    assert float(rows[module.GRAPH][0]) > 0


def test_the_comparison_with_mlx_lm_states_each_claim_with_its_spread(script, tiny_model, tmp_path, capsys):
    script("cpu_vs_mlx_lm", "--model", tiny_model("llama"), "--quick", "--pairs", 1, "--output-dir", tmp_path)
    out = capsys.readouterr().out
    claims = [line for line in out.splitlines() if line.endswith(("| holds |", "| **does not hold** |"))]
    assert len(claims) == 2 + 2 + 1 + 1 + 1
    assert all(" to " in claim for claim in claims)
    assert "prefix caching off" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["comparisons"][-1]["workload"] == "prefix caching, no hits"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}


def test_the_memory_numbers_come_with_tables_pictures_and_the_machine(script, tmp_path, capsys):
    parts = "held,sharing,context"
    (tmp_path / "memory.json").write_text('{"earlier": {}}')
    script("memory", "--parts", parts, "--quick", "--output-dir", tmp_path)
    out = capsys.readouterr().out
    results = json.loads((tmp_path / "memory.json").read_text())
    assert results.pop("earlier") == {}, "what other runs measured stays"
    assert list(results) == parts.split(",")
    for part, result in results.items():
        assert result["quick"]
        assert result["machine"]["mlx-lm"]
        assert f"## {part}" in out
        assert (tmp_path / f"memory-{part}.png").stat().st_size < 100_000
    ways = list(results["held"]["ways"].values())
    assert ways[-1]["useful"] > 0.9 > ways[0]["useful"]
    for way in ("sampled", "beams"):
        saved = [one["saved"] for one in results["sharing"][way].values()]
        assert 0 < saved[0] < saved[1] < saved[2]
    assert out.count(" (run) |") == 3
    assert [(run["scenario"], run["users"]) for run in results["context"]["runs"]] == [
        ("equal", 1),
        ("one long", 4),
        ("one document", 16),
    ]


def test_an_unknown_part_of_the_memory_numbers_is_refused(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script("memory", "--parts", "waste,nonsense", "--output-dir", tmp_path)
    assert "there is no part nonsense" in capsys.readouterr().err


def test_arrivals_are_timed_for_every_contestant(script, tiny_model, tmp_path, capsys):
    options = ["--requests", 3, "--rate", 20, "--pairs", 2, "--plot", tmp_path / "arrivals.png"]
    script("arrivals", "--model", tiny_model("llama"), *options)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if " ms |" in line]
    assert len(rows) == 4
    assert all(row.count(" to ") == 5 for row in rows)
    assert (tmp_path / "arrivals.png").exists()


def test_the_cost_of_grammars_is_a_table(script, tmp_path, capsys):
    from tiny_text_model import write_tiny_text_model

    script("structured_outputs", "--model", write_tiny_text_model(tmp_path), "--rows", 1, 3, "--steps", 3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 ", "| 3 "))]
    assert len(lines) == 2
    for line in lines:
        assert all(float(cell) > 0 for cell in line.split("|")[2:5])


def test_the_servers_overhead_is_told_per_token(script, monkeypatch, capsys):
    from mlx_paged_attention.api import async_llm

    monkeypatch.setattr(async_llm, "start_engine", None)  # the script puts its own there, for this process
    script("server_overhead", "--streams", 2, "--steps", 8, "--step-ms", 1, "--requests", "chat")
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| chat")]
    _, writing, building, *_ = (cell.strip() for cell in row.strip("|").split("|"))
    assert 0 < float(writing) < float(building)
