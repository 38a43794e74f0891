"""`hardneg audit` from end to end: every kind of input, and one set of numbers in JSON, table and page."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_audit import make_data
from typer.testing import CliRunner

import hardneg as hn
from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.auditing.inputs import read_tags
from hardneg.auditing.options import Settings
from hardneg.auditing.terminal import ABSENT, COLUMNS, as_text
from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, FileError
from hardneg.io.files import write_json
from support.errors import raises
from support.mining_jobs import write_lines
from support.vectors import save_embeddings


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    z, views, labels = make_data(60)
    np.save(tmp_path / "z.npy", z.float().numpy())
    np.save(tmp_path / "views.npy", views.float().numpy())
    np.save(tmp_path / "labels.npy", labels.numpy())
    return {name: str(tmp_path / f"{name}.npy") for name in ("z", "views", "labels")}


def test_labels_of_a_text_file_are_its_lines_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes("\ufeffcat\r\ndog\ncat\n".encode())
    assert read_tags("labels", str(tmp_path / "labels.txt"), None) == ["cat", "dog", "cat"]


def test_labels_without_a_header_are_not_read_as_one_label_less(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("3\n1\n4\n")
    with raises(FileError, who="audit", path=str(path), got="3"):
        read_tags("labels", str(path), None)
    path.write_text("label\n3\n1\n4\n")
    assert [str(one) for one in read_tags("labels", str(path), None)] == ["3", "1", "4"]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["audit", *arguments], env={"COLUMNS": "250"})


class Cells(HTMLParser):
    """The rows of #results as lists of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = self.cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.inside = ("id", "results") in attrs
        elif tag == "tr" and self.inside:
            self.rows.append([])
        elif tag in ("td", "th") and self.inside:
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag: str) -> None:
        self.cell = self.cell and tag not in ("td", "th")
        self.inside = self.inside and tag != "table"

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.rows[-1][-1] += data


def test_from_end_to_end(files: dict[str, str], tmp_path: Path) -> None:
    """JSON, terminal and page say the same numbers, and those are hn.audit's."""
    out = tmp_path / "out"
    result = call(
        files["z"], "--labels", files["labels"], "--positives", files["views"], "-n", "Tilt(3.0)", "-n",
        "BelowPositive(0.1)", "--temperature", "0.3", "--tau-plus", "0.1", "--wanted-false-negatives", "0.3",
        "--num-anchors", "50", "--seed", "3", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    stored = json.loads((out / "audit.json").read_text(), parse_constant=pytest.fail)
    z, views, labels = (torch.from_numpy(np.load(files[name])) for name in ("z", "views", "labels"))
    found = hn.audit(
        z, ["Tilt(3.0)", "BelowPositive(0.1)"], labels=labels, positives=views, temperature=0.3, tau_plus=0.1,
        wanted_false_negatives=0.3, num_anchors=50, seed=3,
    )  # fmt: skip
    same = found.to_dict()
    for name in ("rows", "suggestions", "num_anchors", "random_similarity", "positive_similarity", "exact"):
        assert stored[name] == same[name], name
    page = Cells()
    html = (out / "audit.html").read_text()
    page.feed(html)
    header, *cells = page.rows
    shown = {name: show for name, show in COLUMNS.items() if name in header}
    assert header == ["rule", *shown]
    assert len(cells) == len(found.rows) == len(stored["rows"])
    terminal = unescape(result.output)
    for number, (row, line) in enumerate(zip(found.rows, cells, strict=True), 1):
        assert line[0] == f"{number}{row.expression}"
        assert line[1:] == [show(row) for show in shown.values()]
        [printed] = [
            each for each in terminal.splitlines() if re.match(rf"│ [* ] {re.escape(row.expression)} +│", each)
        ][:1]
        assert [cell.strip() for cell in printed.split("│")[2:-1]] == line[1:]
    for one in stored["suggestions"]:
        assert (one["expression"] or one["family"]) in unescape(html)
        assert one["sentence"] in unescape(html)
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert html.count("<svg") == 3, "the frontier for wide and narrow screens, and the similarities"
    assert "audit.html" in result.output
    assert [path.name for path in sorted(out.iterdir())] == ["audit.html", "audit.json"]  # nothing half written


def test_a_run_directory(tmp_path: Path) -> None:
    z, _, labels = make_data(60)
    save_embeddings(tmp_path / "embeddings.npz", z[:40], labels[:40], z[40:], labels[40:])
    for split, size in (("test", 20), ("train", 40)):
        result = call(str(tmp_path), "--split", split, "-o", str(tmp_path / split), "--no-frontier", "-n", "Uniform()")
        assert result.exit_code == 0, result.output
        stored = json.loads((tmp_path / split / "audit.json").read_text())
        assert stored["num_candidates"] == size
        assert stored["rows"][0]["false_negatives"] == pytest.approx(
            hn.audit((z[40:] if split == "test" else z[:40]).float(), "Uniform()", frontier=False,
                     labels=labels[40:] if split == "test" else labels[:40]).rows[0].false_negatives
        )  # fmt: skip


def test_a_run_is_audited_at_its_last_temperature_under_a_readable_name(tmp_path: Path) -> None:
    z, _, labels = make_data(60)
    run = tmp_path / "simclr-8356bb30-seed3"
    run.mkdir()
    save_embeddings(run / "embeddings.npz", z[:40], labels[:40], z[40:], labels[40:])
    options = {"data": "digits", "negatives": "Tilt(2.0)", "temperature": "linear(0.5, 0.2)", "seed": 3}
    for projects, words in ((True, "compared projections"), (False, "are those that the loss compared")):
        write_json(
            run / "config.json",
            {"recipe": "simclr", "options": options, "trained": {"encoder": {"projects": projects}}},
        )
        for given, used in (([], 0.2), (["--temperature", "0.7"], 0.7)):
            result = call(str(run), *given, "-n", "Tilt(1.0)", "--no-frontier", "-o", str(tmp_path / "out"))
            assert result.exit_code == 0, result.output
            stored = json.loads((tmp_path / "out" / "audit.json").read_text())
            wanted = hn.audit(z[40:].float(), "Tilt(1.0)", labels=labels[40:], temperature=used, frontier=False)
            assert stored["temperature"] == used
            assert stored["rows"][0]["false_negatives"] == pytest.approx(wanted.rows[0].false_negatives)
            assert any(words in note for note in stored["notes"])
            page = (tmp_path / "out" / "audit.html").read_text()
            assert "<title>How hard and how false are the negatives of simclr with Tilt(2.0) on digits, seed 3?" in page


@pytest.mark.parametrize("kind", ["npz", "parquet", "jsonl", "safetensors", "txt", "csv"])
def test_labels_and_embeddings_in_any_format(kind: str, files: dict[str, str], tmp_path: Path) -> None:
    z, labels = np.load(files["z"]), np.load(files["labels"])
    words = [f"class {label}" for label in labels]
    path, more = str(tmp_path / f"data.{kind}"), []
    if kind == "npz":
        np.savez(path, vectors=z, labels=labels)
    elif kind == "safetensors":
        save = pytest.importorskip("safetensors.numpy", reason="needs safetensors").save_file
        save({"vectors": z}, path)
        more = ["--labels", files["labels"]]
    elif kind == "txt":
        (tmp_path / "labels.txt").write_text("\n".join(words))
        path, more = files["z"], ["--labels", str(tmp_path / "labels.txt")]
    elif kind == "csv":
        (tmp_path / "labels.csv").write_text("name,label\n" + "".join(f"{i},{word}\n" for i, word in enumerate(words)))
        path, more = files["z"], ["--labels", str(tmp_path / "labels.csv")]
    else:
        rows = [{"id": f"x{i}", "embedding": z[i].tolist(), "kind": word} for i, word in enumerate(words)]
        if kind == "jsonl":
            write_lines(Path(path), rows)
        else:
            pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'mine'")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
        more = ["--label-column", "kind"]
    result = call(path, *more, "-n", "Rank(0, 3)", "--no-frontier", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    stored = json.loads((tmp_path / "out" / "audit.json").read_text())
    wanted = hn.audit(torch.from_numpy(z), "Rank(0, 3)", labels=torch.from_numpy(labels), frontier=False).rows[0]
    assert stored["rows"][0]["false_negatives"] == pytest.approx(wanted.false_negatives, abs=1e-9)
    if kind in ("jsonl", "parquet"):
        assert str(stored["rows"][0]["hubs"][0]["id"]).startswith("x")


def test_queries_and_a_corpus_with_judgements(tmp_path: Path) -> None:
    z, _, _ = make_data(60)
    np.save(tmp_path / "q.npy", z[:5].float().numpy())
    np.save(tmp_path / "d.npy", z[5:].float().numpy())
    queries = write_lines(tmp_path / "queries.jsonl", [{"id": f"q{i}", "text": f"query {i}"} for i in range(5)])
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"id": i * 10, "text": f"text {i}"} for i in range(55)])
    judged = [(f"q{i}", 10 * (i + j), 1 + j) for i in range(4) for j in range(3)] + [("q0", 540, 0)]
    lines = "".join(f"{q}\t{d}\t{s}\n" for q, d, s in judged)
    (tmp_path / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")
    result = call(
        str(tmp_path / "q.npy"), "--queries", queries, "--corpus", corpus, "--corpus-embeddings",
        str(tmp_path / "d.npy"), "--judgements", str(tmp_path / "qrels.tsv"), "-o", str(tmp_path / "out"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    stored = json.loads((tmp_path / "out" / "audit.json").read_text())
    best_first = [[i + 2, i + 1, i] for i in range(4)] + [[]]
    wanted = hn.audit(z[:5].float(), corpus=z[5:].float(), judgements=best_first)
    shares = [None if math.isnan(row.false_negatives) else row.false_negatives for row in wanted.rows]
    assert [row["false_negatives"] for row in stored["rows"]] == shares
    assert stored["num_anchors"] == 4
    assert any(row["expression"].startswith("BelowPositive") for row in stored["rows"])


def test_the_embeddings_file_of_a_run_is_the_run(tmp_path: Path) -> None:
    z, _, labels = make_data(60)
    file = tmp_path / "embeddings.npz"
    save_embeddings(file, z[:40], labels[:40], z[40:], labels[40:])
    stored = {}
    for name in (str(file), str(tmp_path)):
        result = call(name, "--split", "train", "-o", str(tmp_path / "out"), "--num-anchors", "40")
        assert result.exit_code == 0, result.output
        stored[name] = json.loads((tmp_path / "out" / "audit.json").read_text())["rows"]
    assert stored[str(file)] == stored[str(tmp_path)]
    # Named by its array it is any file of embeddings.
    result = call(str(file), "--embedding-column", "test_x", "--label-column", "test_y", "-o", str(tmp_path / "test"))
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "test" / "audit.json").read_text())["rows"]
    assert rows == audit_files(AuditOptions(str(tmp_path))).to_dict()["rows"]


def test_a_run_reads_other_labels_and_groups(tmp_path: Path) -> None:
    z, _, labels = make_data(60)
    save_embeddings(tmp_path / "embeddings.npz", z[:40], labels[:40], z[40:], labels[40:])
    np.save(tmp_path / "coarse.npy", labels[40:].numpy() // 2)
    np.save(tmp_path / "groups.npy", np.arange(20) // 2)
    stored = {"labels": str(tmp_path / "coarse.npy"), "groups": str(tmp_path / "groups.npy")}
    options = AuditOptions(str(tmp_path), ("Uniform()",), Settings(frontier=False), **stored)
    found = audit_files(options)
    wanted = hn.audit(z[40:].float(), "Uniform()", labels=labels[40:] // 2, groups=np.arange(20) // 2, frontier=False)
    assert found.rows[0].false_negatives == wanted.rows[0].false_negatives
    assert found.judges == ("labels", "groups")


def test_embeddings_with_ids_are_matched_by_id_beside_a_table(tmp_path: Path) -> None:
    """Rows of the table and of the embeddings in different orders, labels in either file."""
    z, _, labels = make_data(60)
    ids = [f"x{i}" for i in range(60)]
    mixed = np.random.default_rng(0).permutation(60)
    np.savez(
        tmp_path / "z.npz", vectors=z.float().numpy()[mixed], ids=np.array(ids)[mixed], groups=labels.numpy()[mixed]
    )
    rows = [
        {"id": name, "text": name, "kind": f"class {label}"} for name, label in zip(ids, labels.tolist(), strict=True)
    ]
    table = write_lines(tmp_path / "rows.jsonl", rows)
    wanted = hn.audit(z.float(), "Rank(0, 3)", labels=labels, frontier=False).rows[0].false_negatives
    for more in ({"label_column": "kind"}, {}):
        options = AuditOptions(
            str(tmp_path / "z.npz"), ("Rank(0, 3)",), Settings(frontier=False), queries=table, **more
        )
        found = audit_files(options)
        assert found.rows[0].false_negatives == pytest.approx(wanted, abs=1e-12)
        assert found.judges == (("labels", "groups") if more else ("groups",))
    write_lines(tmp_path / "rows.jsonl", [*rows, {"id": "new", "text": "new", "kind": "?"}])
    with raises(ArgumentError, who="audit", got="'new'"):
        audit_files(options)
    write_lines(tmp_path / "rows.jsonl", rows[:50])  # a part of them will do
    assert audit_files(options).num_candidates == 50


def test_labels_of_queries_and_corpus_need_no_judgements(tmp_path: Path) -> None:
    z, _, labels = make_data(60)
    np.savez(tmp_path / "q.npz", vectors=z[:10].float().numpy(), labels=labels[:10].numpy())
    np.savez(
        tmp_path / "d.npz", vectors=z[10:].float().numpy(), labels=np.array([str(one) for one in labels[10:].tolist()])
    )
    quiet = Settings(frontier=False)
    found = audit_files(
        AuditOptions(str(tmp_path / "q.npz"), ("Rank(0, 5)",), quiet, corpus_embeddings=str(tmp_path / "d.npz"))
    )
    keys = hn.Keys(z[10:].float(), labels=labels[10:])
    wanted = hn.audit(z[:10].float(), "Rank(0, 5)", corpus=keys, labels=labels[:10], frontier=False)
    assert found.rows[0].false_negatives == pytest.approx(wanted.rows[0].false_negatives, abs=1e-12)
    assert found.judges == ("labels",)


UNREAD: list[tuple[str, list[str], str]] = [
    ("{z}", ["--model", "m"], "--model for embeddings,"),
    ("{z}", ["--query-embeddings", "{z}"], "--query-embeddings for embeddings,"),
    ("{z}", ["--split", "train"], "--split for embeddings,"),
    ("{z}", ["--corpus-column", "text"], "--corpus-column for embeddings,"),
    ("{z}", ["--corpus-embeddings", "{z}", "--labels", "{y}"], "no --labels for embeddings with a corpus"),
    ("{z}", ["--corpus-embeddings", "{z}", "--groups", "{y}"], "no --groups for embeddings with a corpus"),
    ("{z}", ["--corpus-embeddings", "{z}", "--positives", "{z}"], "no --positives for embeddings with a corpus"),
    ("{run}", ["--queries", "{mined}"], "--queries for a run"),
    ("{run}", ["--corpus", "{mined}"], "--corpus for a run"),
    ("{run}", ["--label-column", "y"], "--labels together with --label-column y"),
    ("{mined}", ["--labels", "{y}"], "--labels for a mined file"),
    ("{mined}", ["--groups", "{y}"], "--groups for a mined file"),
    ("{mined}", ["--positives", "{z}"], "--positives for a mined file"),
    ("{mined}", ["--split", "test"], "--split for a mined file"),
    ("{mined}", ["--model", "m"], "--model for a mined file without --queries or --corpus"),
    ("{mined}", ["--corpus", "{mined}", "--label-column", "y"], "--label-column for a mined file"),
    ("{z}", ["--query-id-column", "key"], "a table of queries for the column 'key'"),
    ("{z}", ["--label-column", "y"], "the column or array 'y' of labels in"),
    ("{z}", ["--group-column", "y"], "the column or array 'y' of groups in"),
]


@pytest.mark.parametrize(("input", "more", "message"), UNREAD, ids=[each[2][:60] for each in UNREAD])
def test_an_option_that_is_not_read_is_an_error(input: str, more: list[str], message: str, tmp_path: Path) -> None:
    known = write_wrong(tmp_path)
    z = np.load(known["z"])
    (tmp_path / "run").mkdir()
    save_embeddings(
        tmp_path / "run" / "embeddings.npz", *(torch.from_numpy(each) for each in (z, np.arange(6) % 2) * 2)
    )
    known["run"] = str(tmp_path / "run")
    known["mined"] = write_lines(tmp_path / "mined.jsonl", [{"anchor": "a", "positive": "p", "negative": "n"}])
    assert call(input.format(**known), "-o", str(tmp_path / "fine")).exit_code == 0
    result = call(input.format(**known), *(each.format(**known) for each in more), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mined.jsonl.gz", "table.csv.gz"])
def test_a_cut_off_gzip_file_is_an_error(name: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"anchor": f"a{i}", "positive": f"p{i}", "negative": "n"}) + "\n" for i in range(5000))
    packed = gzip.compress(lines.encode())
    for size in (30, len(packed) // 2):
        (tmp_path / name).write_bytes(packed[:size])
        result = call(str(tmp_path / name), "-o", str(tmp_path / "out"))
        assert result.exit_code == 2, result.output
        assert f"audit needs an undamaged gzip file, got {tmp_path / name}" in " ".join(result.output.split())


def test_what_the_disk_refuses_is_no_wrong_input(files: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hardneg.auditing.result.Audit.write_json", full)
    result = call(files["z"], "-n", "Uniform()", "--no-frontier", "-o", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "No space left" in result.output


def write_wrong(tmp_path: Path) -> dict[str, str]:
    z = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    bad = z.copy()
    bad[2, 1] = np.nan
    arrays = {
        "z": z,
        "nan": bad,
        "five": np.arange(5),
        "flat": np.arange(6.0),
        "narrow": z[:, :2],
        "y": np.arange(6) % 2,
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "none.tsv").write_text("query-id\tcorpus-id\tscore\nx\ty\t1\n")
    (tmp_path / "half.parquet").write_bytes(b"PAR1")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text("{}")
    write_lines(tmp_path / "table.jsonl", [{"id": 1, "text": "a"}])
    write_lines(tmp_path / "labelled.jsonl", [{"id": 1, "text": "a", "label": 1}])
    return {"dir": str(tmp_path), **{name: str(tmp_path / f"{name}.npy") for name in arrays}}


WRONG: list[tuple[list[str], str]] = [
    (["{dir}/nowhere.npy"], "exists, got"),
    (["{nan}"], "audit needs finite vectors, got NaN or inf in embeddings: first in row 2"),
    (["{flat}"], "embeddings [n, d]"),
    (["{z}", "--labels", "{five}"], "for each of 6 rows, got 5 labels"),
    (["{z}", "--labels", "{dir}/nowhere.npy"], "file of labels that exists"),
    (["{z}", "--labels", "{z}"], "labels [n] that are integers or text"),
    (["{z}", "--positives", "{narrow}"], "second view (6, 3)"),
    (["{z}", "-n", "BelowPositive(0.1)"], "needs positives, got embeddings"),
    (["{z}", "-n", "Tlit(1.0)"], "Did you mean Tilt?"),
    (["{z}", "--judgements", "{dir}/none.tsv"], "none.tsv that match the ids"),
    (["{z}", "--corpus-embeddings", "{z}"], "give --judgements"),
    (["{z}", "--corpus-embeddings", "{narrow}", "--judgements", "{dir}/none.tsv"], "none.tsv that match the ids"),
    (["{z}", "--wanted-false-negatives", "0.02"], "needs labels, groups or held-out judgements"),
    (
        ["{z}", "--wanted-false-negatives", "2"],
        "needs --wanted-false-negatives in [0.0, 1.0], got --wanted-false-negatives 2.0",
    ),
    (["{z}", "--similarity", "l2"], "needs --similarity to be one of cosine, dot, got 'l2'"),
    (["{z}", "--out", "{z}"], "needs a folder as --out"),
    (["{dir}/table.jsonl"], "or a mined file, got"),
    (["{dir}/labelled.jsonl"], "or a mined file, got"),
    (["{dir}/half.parquet"], "Parquet"),
    (
        ["{dir}/begun"],
        "audit needs a finished run, got {dir}/begun/embeddings.npz, which is missing; give its command again",
    ),
    (["{z}", "--temperature", "0"], "temperature above 0"),
    (["{z}", "--no-frontier"], "got none and no frontier; give --negatives, or leave the frontier on"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_wrong_input_is_one_sentence_and_writes_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    known = write_wrong(tmp_path)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    result = call(*(each.format(**known) for each in arguments), *out)
    assert result.exit_code == 2, result.output
    assert message.replace("{dir}", known["dir"]) in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_python_reads_a_mined_file_as_the_command_does(tmp_path: Path) -> None:
    rows = [{"anchor": f"a{i}", "positive": f"p{i}", "negative": f"p{(i + 1) % 4}"} for i in range(4)]
    mined = write_lines(tmp_path / "mined.jsonl", rows)
    found = hn.audit(mined=mined, num_anchors=7)
    again = audit_files(AuditOptions(mined, settings=Settings(num_anchors=7)))
    assert found.mined == again.mined
    assert found.mined is not None
    assert found.mined.negatives == 4
    assert call(mined, "-o", str(tmp_path / "out")).exit_code == 0


def test_help_teaches() -> None:
    text = " ".join(call("--help").output.split())
    for part in (
        "Examples:",
        "hardneg audit mined.parquet",
        "--wanted-false-negatives",
        "--negatives",
        "--judgements",
    ):
        assert part in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_narrow_terminals_leave_columns_out_and_cut_no_number(width: int) -> None:
    z, views, labels = make_data(60)
    found = hn.audit(z, "OtherLabel() * Tilt(1.0)", labels=labels, positives=views, num_anchors=50)
    text = as_text(found, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for row in found.rows:
        assert f"{row.similarity:.3f}" in text
        assert COLUMNS["false negatives"](row) in text
    assert ("coverage" in "".join(text.splitlines()[1:4])) == (width == 140)
    assert "…" not in text


def test_the_page_escapes_names(tmp_path: Path) -> None:
    rows = [{"anchor": "<b>a</b>", "positive": "<script>p</script>", "negative": "<SCRIPT>p</script>"}]
    mined = write_lines(tmp_path / "mined.jsonl", rows)
    html = hn.audit(mined=mined).write_html(tmp_path / "a.html").read_text()
    assert "<script>p" not in html.lower()
    assert "&lt;script&gt;p" in html.lower()


def test_absent_columns_are_left_out(files: dict[str, str], tmp_path: Path) -> None:
    assert call(files["z"], "-o", str(tmp_path / "out")).exit_code == 0
    html = (tmp_path / "out" / "audit.html").read_text()
    page = Cells()
    page.feed(html)
    assert "false negatives" not in page.rows[0]
    assert "clamped" not in page.rows[0]
    assert not any(ABSENT in cell for row in page.rows for cell in row)
    assert "it is unknown which negatives are false" in " ".join(html.split())


@pytest.mark.parametrize("name", ["objects.npy", "objects.npz", "words.npy", "cut.npz"])
def test_arrays_that_numpy_cannot_read_raise_without_its_advice(name: str, tmp_path: Path) -> None:
    """NumPy would have people run the code in the file."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32))
    objects = np.array(["a", 1] * 20, dtype=object)
    np.save(tmp_path / "objects.npy", objects)
    np.savez(tmp_path / "objects.npz", labels=objects)
    (tmp_path / "words.npy").write_text("words")
    np.savez(tmp_path / "cut.npz", labels=np.arange(40))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:60])
    for arguments in ([str(tmp_path / "x.npy"), "--labels", str(tmp_path / name)], [str(tmp_path / name)]):
        done = CliRunner().invoke(app, ["audit", *arguments, "--out", str(tmp_path / "out")])
        message = " ".join(done.stderr.split())
        assert done.exit_code == 2, done.output
        assert "audit needs" in message
        assert name in message
        assert "pickle" not in message


def test_ids_of_a_mined_file_do_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2Jdoc"
    rows = [{"anchor": f"a{i}", "positive": f"p{i}", "negative": evil} for i in range(4)]
    done = call(write_lines(tmp_path / "mined.jsonl", rows), "-o", str(tmp_path / "out"))
    assert "most frequent" in done.output
    assert not {"\x1b", "\x07"} & set(done.output)


def test_the_page_is_written_although_nobody_reads_the_table(files: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "hardneg", "audit", files["z"], "--labels", files["labels"], "-o", str(out)]
    read, write = os.pipe()
    os.close(read)  # as of `| head` that has ended
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write)
    assert sorted(path.name for path in out.iterdir()) == ["audit.html", "audit.json"]
    assert done.stderr == ""


@pytest.mark.parametrize("shape", ["(1099511627776, 0)", "(50, 0)", "(-50, 8)", "(1099511627776, 8)", "(True, 8)"])
@pytest.mark.parametrize("place", ["input", "corpus"])
def test_an_npy_header_that_lies_is_one_sentence(shape: str, place: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    np.save(tmp_path / "q.npy", vectors)
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    lying = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + vectors.tobytes()
    (tmp_path / "lying.npy").write_bytes(lying)
    judged = write_lines(tmp_path / "j.jsonl", [{"query-id": i, "corpus-id": i, "score": 1} for i in range(50)])
    arguments = {
        "input": ["lying.npy"],
        "corpus": ["q.npy", "--corpus-embeddings", str(tmp_path / "lying.npy"), "--judgements", judged],
    }[place]
    done = CliRunner().invoke(app, ["audit", str(tmp_path / arguments[0]), *arguments[1:], "--out", str(tmp_path)])
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert "lying.npy" in done.stderr
