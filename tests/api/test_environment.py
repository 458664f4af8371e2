"""What a newcomer's machine may lack, with made-up machines."""

import importlib.metadata
from dataclasses import replace
from typing import Any

import pytest

from mlx_paged_attention.api.environment import Facts, gather_facts, problems, require_supported
from mlx_paged_attention.errors import MlxPagedError

RANGES = {"mlx": ">=0.32.4,<0.34", "mlx-lm": ">=0.32.2,<0.33"}
LINUX = Facts(
    system="Linux",
    machine="x86_64",
    python=(3, 11),
    glibc="2.36",
    installed={"mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-cpu": "0.32.4"},
    ranges=RANGES,
)
MAC = Facts(
    system="Darwin",
    machine="arm64",
    python=(3, 13),
    macos="14.0",
    installed={"mlx": "0.33.1", "mlx-lm": "0.32.9", "mlx-metal": "0.33.1"},
    ranges=RANGES,
)


def test_this_machine_and_good_ones_have_no_problem() -> None:
    assert problems(gather_facts()) == []
    for facts in (LINUX, MAC, replace(MAC, macos="26.1"), replace(LINUX, glibc="2.35")):
        assert problems(facts) == []
    require_supported(LINUX)


@pytest.mark.parametrize(
    ("facts", "change", "words"),
    [
        (LINUX, {"installed": {"mlx": "0.32.4", "mlx-lm": "0.32.2"}}, ["no back end", "[cpu]", "[cuda13]"]),
        (LINUX, {"installed": {"mlx-lm": "0.32.2"}}, ["no back end", "[cpu]"]),
        (LINUX, {"glibc": "2.31"}, ["glibc 2.31", "2.35"]),
        (LINUX, {"glibc": "2.4"}, ["glibc 2.4"]),
        (LINUX, {"glibc": ""}, ["musl"]),
        (LINUX, {"python": (3, 10)}, ["Python 3.10", "3.11"]),
        (
            LINUX,
            {"installed": {**LINUX.installed, "mlx-cuda-13": "0.32.4"}},
            ["mlx-cpu and mlx-cuda-13", "pip uninstall mlx-cpu mlx-cuda-13"],
        ),
        (LINUX, {"installed": {**LINUX.installed, "mlx": "0.34.0"}}, ["mlx 0.34.0", ">=0.32.4,<0.34"]),
        (LINUX, {"installed": {**LINUX.installed, "mlx-lm": "0.32.1"}}, ["mlx-lm 0.32.1"]),
        (LINUX, {"installed": {"mlx": "0.32.4", "mlx-cpu": "0.32.4"}}, ["mlx-lm is not installed"]),
        (MAC, {"machine": "x86_64", "translated": True}, ["Rosetta", "arm64"]),
        (MAC, {"machine": "x86_64"}, ["Apple silicon", "Intel"]),
        (MAC, {"macos": "13.6.1"}, ["macOS 13.6.1", "14"]),
        (MAC, {"installed": {"mlx-lm": "0.32.2"}}, ["mlx is not installed"]),
        (MAC, {"system": "Windows"}, ["Windows", "WSL"]),
    ],
)
def test_what_is_missing_gets_one_helpful_line(
    facts: Facts, change: dict[str, Any], words: list[str]
) -> None:
    (problem,) = problems(replace(facts, **change))
    for word in words:
        assert word in problem
    assert "\n" not in problem
    with pytest.raises(MlxPagedError) as error:
        require_supported(replace(facts, **change))
    assert str(error.value) == problem


def test_a_development_version_counts_by_its_numbers() -> None:
    installed = {**LINUX.installed, "mlx": "0.33.0.dev20261101+abc"}
    assert problems(replace(LINUX, installed=installed)) == []


def test_the_ranges_are_those_that_the_package_declares() -> None:
    assert set(gather_facts().ranges) == {"mlx", "mlx-lm"}
    assert all(">=" in wanted and "<" in wanted for wanted in gather_facts().ranges.values())


def test_a_source_tree_that_is_not_installed_declares_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert gather_facts().ranges == {}
