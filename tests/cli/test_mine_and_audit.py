"""What `hardneg mine` and `hardneg audit` write to the terminal: flags in messages, notes, titles, the help."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hardneg.auditing import audit
from hardneg.auditing.page import audit_page
from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, FileError, HardnegWarning, argument_error, flags_in_errors, spelled
from hardneg.io.arrays import read_npy
from hardneg.io.tables import read_table
from hardneg.io.terminal import progress_bars
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.vectors import make_unit_vectors


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    z = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
    np.save("z.npy", z)
    np.save("d.npy", z[:6])
    Path("j.csv").write_text("query_id,doc_id\n" + "".join(f"{i},{i % 6}\n" for i in range(12)))
    return tmp_path


MINE = ["mine", "z.npy", "--corpus-embeddings", "d.npy", "--judgements", "j.csv", "-n", "Uniform()", "-o", "m.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ([*MINE, "--draw", "best"], "--draw to be one of top, gumbel, categorical, got 'best'"),
        ([*MINE, "--near-positive", "3"], "--near-positive 3.0"),
        ([*MINE, "--search", "magic"], "--search to be one of exact, flat, ivf, hnsw, bm25, got 'magic'"),
        ([*MINE, "--search", "bm25", "--near-negative", "0.9"], "--search bm25"),
        ([*MINE, "--format", "n-tuple", "-k", "9"], "-k 9"),
        (["audit", "z.npy", "--num-anchors", "0"], "--num-anchors 0"),
        (["audit", "z.npy", "-n", "BelowPositive(0.1)"], "--positives"),
        (["audit", "z.npy", "-n", "OtherLabel()"], "--labels"),
    ],
)
def test_messages_name_the_flags(data: Path, arguments: list[str], flag: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert flag in done.output
    assert "=" not in done.output.replace("relative=", "")


@pytest.mark.filterwarnings("ignore:There are no texts")
def test_what_each_factor_removed_is_printed_before_the_error(data: Path) -> None:
    done = CliRunner().invoke(app, [*MINE, "-k", "2", "-n", "AtMost(-2.0)", "--explain"])
    assert done.exit_code == 2
    table, error = done.output.split("mine needs negatives to write")
    assert "1. AtMost(-2.0)" in table
    assert "none of 12 queries" in error


def test_arguments_are_spelled_as_their_user_writes_them() -> None:
    with flags_in_errors({"mine": {"near_positive": "--near-positive"}}):
        assert argument_error("mine", "a cosine", "near_positive", 3).got == "--near-positive 3"
        assert argument_error("Threshold", "a cosine", "near_positive", 3).got == "near_positive=3"
    assert spelled("mine", "near_positive") == "near_positive"


def test_a_k_above_the_corpus_and_rows_of_ids_are_warned_of(data: Path) -> None:
    options = MineOptions(
        "z.npy", "m.jsonl", corpus_embeddings="d.npy", judgements="j.csv", negatives="Uniform()", k=9, similarity="dot"
    )
    with pytest.warns(HardnegWarning) as warned:
        run(options)
    assert {one.message.kind for one in warned} == {"few candidates", "no texts"}  # type: ignore[union-attr]


def test_the_output_begins_with_its_first_line(data: Path) -> None:
    for arguments in ([*MINE, "-k", "2", "--format", "ids"], ["audit", "z.npy", "--no-frontier", "-n", "Tilt(1.0)"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0
        assert done.output.splitlines()[0].strip()


def test_help_fits_80_columns() -> None:
    for verb in ("audit", "mine"):
        text = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [verb, "--help"]).output
        assert "…" not in text
        assert text.count("<bool>") <= 1  # that of --help, which is typer's


def test_false_negatives_are_in_the_title_only_where_they_are_known() -> None:
    z = make_unit_vectors(8, 4)
    plain, labelled = audit(z, frontier=False, negatives="Uniform()"), audit(z, labels=[0, 1] * 4)
    assert "How hard are the negatives" in audit_page(plain)
    assert "How hard and how false are the negatives" in audit_page(labelled)
    assert "Hardness and false negatives" not in plain.table()
    assert "Hardness and false negatives" in labelled.table()


def test_a_row_is_found_by_any_text_of_its_expression() -> None:
    found = audit(make_unit_vectors(8, 4), "Rank(0, 5)", frontier=False)
    assert found.row("Rank(0, 5)") is found.row("Rank(stop=5)") is found.row("Rank( 0,stop=5 )")
    for other in ("Rank(0, 6)", "mined", "no expression"):
        with pytest.raises(ArgumentError):
            found.row(other)


def test_errors_of_files_are_in_our_words(tmp_path: Path) -> None:
    files = {"a.npy": b"nonsense", "a.jsonl": b'{"a": 1}\n{"a": \n', "a.parquet": b"PAR1"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError) as array:
        read_npy("mine", tmp_path / "a.npy")
    with pytest.raises(FileError) as lines:
        read_table(tmp_path / "a.jsonl")
    assert array.value.got == "which is damaged or of another kind"
    assert lines.value.got == "which is not JSON at line 2, character 8"
    pytest.importorskip("pyarrow", reason="needs the extra 'text'")
    with pytest.raises(FileError) as table:
        read_table(tmp_path / "a.parquet")
    assert table.value.got == "which is damaged or of another kind"


def test_a_stage_that_comes_again_has_one_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bars() as bars:
        for steps in (1, 2, 3):
            done = bars("search", steps)
            bars("choose", 1)(1)
            done(steps)
    frame = capsys.readouterr().err.split("\x1b[?25h")[0].split("\x1b[2K")[-1]
    assert frame.count("search") == frame.count("choose") == 1
    assert "3/3" in frame
