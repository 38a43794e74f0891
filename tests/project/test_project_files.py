"""The files around the code agree with each other: version, citation, checks, workflow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hardneg as hn

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_citation_has_the_version() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == hn.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_changelog_has_dated_versions_after_what_is_unreleased() -> None:
    """The form of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert first == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions)
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_pre_commit_runs_the_tools_of_make_check() -> None:
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    hooks = " ".join(hook["entry"] for hook in repository["hooks"])
    for tool in re.findall(r"\$\(BIN\)/([a-z-]+(?: (?:check|format|--config-file \S+))?)", recipe):
        assert f".venv/bin/{tool}" in hooks, tool


def test_the_workflow_tests_both_ends_of_the_versions_on_three_systems() -> None:
    matrix = read(".github/workflows/test.yml")["jobs"]["matrix"]["strategy"]["matrix"]
    assert [name.partition("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    ends = {row["versions"]: row for row in matrix["include"]}
    oldest = re.findall(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [ends["oldest"]["python"]] == oldest
    assert "constraints-oldest.txt" in ends["oldest"]["constraints"]
    assert ends["newest"]["constraints"] == ""
