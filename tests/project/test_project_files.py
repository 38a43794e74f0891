"""The files around the code agree with each other: version, citation, checks, workflow."""

from __future__ import annotations

import re
import tomllib
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


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_the_repository_has_one_address() -> None:
    address = project()["urls"]["Repository"]
    assert read("mkdocs.yml")["repo_url"] == read("CITATION.cff")["repository-code"] == address
    assert project()["urls"]["Documentation"] == read("mkdocs.yml")["site_url"]
    names = ["README.md", "CHANGELOG.md", "conda/meta.yaml", ".github/ISSUE_TEMPLATE/config.yml"]
    for name in names:
        for found in re.findall(r"https://github\.com/[\w-]+/hardneg\b", (ROOT / name).read_text(encoding="utf-8")):
            assert found == address, name


def test_the_conda_recipe_has_the_version_and_the_requirements() -> None:
    recipe = (ROOT / "conda" / "meta.yaml").read_text(encoding="utf-8")
    assert f'version = "{hn.__version__}"' in recipe
    for one in project()["dependencies"]:
        name, bound = one.split(">=")
        assert f"- {name.replace('torch', 'pytorch')} >={bound}" in recipe
    assert "hardneg = hardneg.cli.app:main" in recipe


def test_actions_are_pinned_by_commit_and_permissions_are_least() -> None:
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert {path.stem for path in workflows} >= {"test", "release", "docs"}
    for path in workflows:
        text = path.read_text(encoding="utf-8")
        used = re.findall(r"uses: (.*)$", text, re.MULTILINE)
        assert used
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in used), path.name
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_the_release_workflow_publishes_a_tag_without_a_token() -> None:
    release = read(".github/workflows/release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as True
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    for step in ("--require-hashes", "build --no-isolation", "twine check --strict", "twine upload"):
        assert step in text
    assert "secrets." not in text
    assert "password" not in text


def test_the_tools_of_the_release_have_hashes() -> None:
    lines = (ROOT / "requirements-release.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert {"build", "setuptools", "twine"} <= {line.partition("==")[0] for line in lines}


def test_all_has_every_extra_for_users() -> None:
    extras = project()["optional-dependencies"]
    (named,) = re.findall(r"hardneg\[(.*)\]", extras["all"][0])
    assert set(named.split(",")) == set(extras) - {"all", "bench", "dev", "docs", "test"}
