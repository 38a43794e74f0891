"""Options are declared once: flags and YAML names of mine and audit come from the dataclasses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import hardneg.auditing.files
import hardneg.mining.estimate
from hardneg.auditing.options import AuditOptions, Settings
from hardneg.cli.app import app
from hardneg.cli.audit import audit
from hardneg.cli.flags import GENERAL, from_file
from hardneg.cli.mine import mine
from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.mining.options import Columns, MineOptions


def names_of(*options: type) -> set[str]:
    return {one.name for kind in options for one in fields(kind) if "part" not in one.metadata}


def test_every_option_of_mine_is_a_flag_and_only_three_are_not_options() -> None:
    columns = {f"{name}_column" for name in names_of(Columns)}
    flags = set(inspect.signature(mine).parameters) - {one.name for one in GENERAL}
    assert flags - {"ctx", "config", "dry_run", "explain"} == (names_of(MineOptions) | columns)


def test_every_option_of_audit_is_a_flag() -> None:
    columns = {f"{name}_column" for name in ("query", "query_id", "corpus", "corpus_id")}
    flags = set(inspect.signature(audit).parameters) - {one.name for one in GENERAL}
    assert flags - {"ctx", "config", "out", "overwrite"} == (names_of(AuditOptions, Settings) | columns)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that the verbs were run with; nothing is mined or audited."""
    seen: list[Any] = []

    def stop(options: Any, *_: Any) -> None:
        seen.append(options)
        raise ArgumentError("test", "nothing", "options")

    monkeypatch.setattr(hardneg.mining.estimate, "estimate", stop)
    monkeypatch.setattr(hardneg.auditing.files, "audit_files", stop)
    return seen


def hardneg_(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_file_gives_what_the_flags_give_and_flags_win(tmp_path: Path, received: list[Any]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("k: 7\nnear-positive: 0.9\nquery_column: q\nbm25: true\nnegatives: Rank(0, 5)\n")
    flags = ("-k", "7", "--near-positive", "0.9", "--query-column", "q", "--bm25", "-n", "Rank(0, 5)")
    same = ("mine", "q.jsonl", "-o", str(tmp_path / "out.jsonl"), "--dry-run")
    hardneg_(*same, *flags)
    hardneg_(*same, "--config", str(file))
    hardneg_(*same, "--config", str(file), "-k", "3")
    assert received[0] == received[1]
    assert received[0].columns == Columns(query="q")
    assert [options.k for options in received] == [7, 7, 3]


def test_parts_and_lists_of_audit(tmp_path: Path, received: list[Any]) -> None:
    file = tmp_path / "audit.yaml"
    file.write_text("negatives: [Tilt(1.0), 'Rank(0, 5)']\nnum-anchors: 9\nfrontier: false\n")
    same = ("audit", "x.npy", "--out", str(tmp_path / "out"))
    hardneg_(*same, "-n", "Tilt(1.0)", "-n", "Rank(0, 5)", "--num-anchors", "9", "--no-frontier")
    hardneg_(*same, "--config", str(file))
    assert received[0] == received[1]
    assert received[0].negatives == ("Tilt(1.0)", "Rank(0, 5)")
    assert received[0].settings == Settings(num_anchors=9, frontier=False)


def test_a_wrong_file_names_the_option(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("candidate: 5\n")
    with pytest.raises(UnknownName) as unknown:
        from_file("mine", file, MineOptions)
    assert unknown.value.nearest == "candidates"
    for line in ("k: many", "k: 0", "scores: 3", "negatives: [1, 2]"):
        file.write_text(line)
        with pytest.raises(ArgumentError) as wrong:
            from_file("mine", file, AuditOptions if line.startswith("neg") else MineOptions)
        assert line.partition(":")[0] in str(wrong.value)


def test_errors_name_the_flag_that_exists() -> None:
    for words, reported in (
        ("-k 0", "mine needs -k of at least 1, got 0."),
        ("--seed 9223372036854775808", "mine needs --seed below 2**63, got --seed 9223372036854775808."),
    ):
        done = hardneg_("mine", "q.jsonl", "-o", "out.jsonl", *words.split())
        assert done.exit_code == 2
        assert reported in " ".join(done.stderr.split())


def test_configurations_are_utf_8_on_every_system(tmp_path: Path) -> None:
    """Where the system has another default, Python would read them by that."""
    pytest.importorskip("yaml", reason="configurations need the extra train")
    (tmp_path / "job.yaml").write_text("queries: größe.jsonl", encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from hardneg.cli.errors import read_yaml; read_yaml(Path(sys.argv[1]))"
    )
    strict = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning:hardneg.cli.errors"]
    done = subprocess.run([sys.executable, *strict, "-c", code, str(tmp_path / "job.yaml")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    "verb", [("train", "simclr"), ("compare",), ("mine", "q.npy", "-o", "m.jsonl"), ("audit", "z.npy")]
)
def test_aliases_in_a_configuration_are_refused_at_once(verb: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="configurations need the extra train")
    levels = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 40)]  # 10^39 values
    (tmp_path / "bomb.yaml").write_text("\n".join(["x0: &x0 [lol]", *levels, "temperature: *x39"]))
    done = hardneg_(*verb, "--config", str(tmp_path / "bomb.yaml"))
    assert done.exit_code == 2
    assert "alias *x0 in line 2" in " ".join(done.stderr.split())
