"""Mining loses nothing and takes nothing stale: outputs, caches, locks, files that lie about their size, far sizes."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hardneg as hn
from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, DataChanged, FileError, InUse
from hardneg.io.files import locked
from hardneg.io.tables import read_table, read_vectors
from hardneg.mining.encode import encoder_of_function
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.errors import raises
from support.libraries import part_of_sentence_transformers
from support.mining_jobs import expected, lines, make_job, make_rows, write_lines


@pytest.fixture
def job(tmp_path: Path) -> MineOptions:
    return make_job(tmp_path)


def spellings(path: Path) -> dict[str, Path]:
    folder = path.parent
    (folder / "symbolic.jsonl").symlink_to(path)
    os.link(path, folder / "hard.jsonl")
    (folder / "other").symlink_to(folder)
    return {
        "as it is": path,
        "by way of": folder / "nowhere" / ".." / path.name,
        "relative": Path(os.path.relpath(path)),
        "symbolic link": folder / "symbolic.jsonl",
        "hard link": folder / "hard.jsonl",
        "link to the folder": folder / "other" / path.name,
    }


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("side", ["queries", "corpus"])
def test_output_is_never_an_input(side: str, overwrite: list[str], job: MineOptions) -> None:
    path = Path(str(getattr(job, side)))
    before = path.read_bytes()
    for how, out in spellings(path).items():
        given = ["mine", job.queries, "--corpus", str(job.corpus), "--encoder", str(job.encoder), "-o", str(out)]
        done = CliRunner().invoke(app, [*given, *overwrite])
        assert done.exit_code == 2, how
        assert "an output apart from its inputs" in " ".join(done.stderr.split()), how
        assert path.read_bytes() == before, how


def test_an_input_in_a_folder_of_outputs(job: MineOptions, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    corpus = write_lines(folder / "corpus.jsonl", make_rows()[1])
    with raises(FileError, who="mine", got="corpus.jsonl"):
        run(replace(job, corpus=corpus, out=str(folder), overwrite=True))
    held = Path(f"{job.out}.work") / "0.0-lists.0.0-000000.npz"
    held.parent.mkdir()
    np.savez(held, vectors=np.ones((60, 4), dtype=np.float32))
    with raises(FileError, who="mine", path="mined.jsonl.work", got="the input"):
        run(replace(job, corpus_embeddings=str(held)))


def test_files_of_others_are_replaced_only_with_overwrite(job: MineOptions) -> None:
    out, manifest = Path(job.out), Path(f"{job.out}.manifest.json")
    out.write_text("theirs")
    with raises(FileError, who="mine", path="mined.jsonl", got="which something else has written", fix="--overwrite"):
        run(job)
    assert out.read_text() == "theirs"
    run(replace(job, overwrite=True))
    run(job)  # its own
    assert [row["negative_ids"] for row in lines(out)] == expected()
    out.write_text(out.read_text() + out.read_text())
    with raises(FileError, who="mine", got="which something else has written"):  # it was changed since
        run(job)
    out.unlink()
    manifest.write_text('{"precious": true}')
    with raises(FileError, who="mine", got="which something else has written"):
        run(job)
    assert manifest.read_text() == '{"precious": true}'


def test_audits_write_over_nothing_of_others(tmp_path: Path) -> None:
    np.save(tmp_path / "z.npy", np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32))
    out = tmp_path / "audit"
    call = ["audit", str(tmp_path / "z.npy"), "-o", str(out), "--no-frontier", "-n", "Uniform()"]
    for _ in range(2):  # the second replaces what the first has made
        assert CliRunner().invoke(app, call).exit_code == 0
    for name in ("audit.html", "audit.json"):
        mine = (out / name).read_text().replace("Uniform", "uniform")
        (out / name).write_text(mine)
        refused = CliRunner().invoke(app, call)
        assert refused.exit_code == 2, refused.output
        assert "--overwrite" in refused.stderr
        assert (out / name).read_text() == mine
        assert CliRunner().invoke(app, [*call, "--overwrite"]).exit_code == 0
    labels = {"labels": ["a", "b"] * 15}
    (tmp_path / "audit.json").write_text(json.dumps(labels))
    both = ["audit", str(tmp_path / "z.npy"), "--labels", str(tmp_path / "audit.json"), "-o", str(tmp_path)]
    refused = CliRunner().invoke(app, [*both, "--overwrite"])
    assert refused.exit_code == 2
    assert json.loads((tmp_path / "audit.json").read_text()) == labels


@pytest.mark.parametrize("margin", ["relative=5", "relative=1.01", "relative=inf", "absolute=inf", "absolute=-inf"])
def test_margins_that_mean_nothing(margin: str) -> None:
    with pytest.raises(ValueError, match="BelowPositive needs"):
        hn.BelowPositive(**{margin.partition("=")[0]: float(margin.partition("=")[2])})
    for legal in (-3.0, 0.0, 0.95, 1.0):
        assert hn.BelowPositive(relative=legal).relative == legal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 100}, r"k=100 where a query has at most 59 candidates.*use k=59 or format='triplet'"),
        ({"k": 5, "negatives": "Rank(2, 5)"}, "at most 3 candidates"),
    ],
)
def test_tuples_that_no_query_can_fill(change: dict[str, Any], message: str, job: MineOptions) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(replace(job, format="n-tuple", encoder="nowhere:encode", **change))  # before anything is encoded
    assert not Path(job.out).exists()


@pytest.mark.parametrize("kind", ["n-tuple", "triplet", "labeled-list"])
def test_an_output_without_rows_is_an_error(kind: str, job: MineOptions) -> None:
    with pytest.raises(ArgumentError, match=rf"negatives to write as {kind}, got none of 20 queries"):
        run(replace(job, format=kind, negatives="Threshold(0.9999)", k=2))
    assert not Path(job.out).exists()


@pytest.mark.parametrize("where", ["file", "column"])
def test_empty_documents_need_no_vector(where: str, job: MineOptions, tmp_path: Path) -> None:
    queries, corpus = make_rows()
    corpus += [{"id": "empty", "text": "  "}, {"id": "none", "text": ""}]
    vectors = {row["id"]: hash_vector(row["text"]) for row in corpus[:60]}
    for row in queries:
        row["embedding"] = hash_vector(row["query"])
    change: dict[str, Any] = {"embedding_column": "embedding"}
    if where == "file":
        names = list(vectors)
        np.savez(tmp_path / "d.npz", vectors=np.array(list(vectors.values()), dtype=np.float32), ids=np.array(names))
        change["corpus_embeddings"] = str(tmp_path / "d.npz")
        change["query_embeddings"] = str(tmp_path / "q.npy")
        change["embedding_column"] = None
        np.save(tmp_path / "q.npy", np.array([row["embedding"] for row in queries], dtype=np.float32))
    else:
        for row in corpus:
            row["embedding"] = vectors.get(row["id"]) if row["id"] != "none" else []
    paths = {
        "queries": write_lines(tmp_path / "q.jsonl", queries),
        "corpus": write_lines(tmp_path / "c.jsonl", corpus),
    }
    summary = run(replace(job, encoder=None, **paths, **change))
    assert summary is not None
    assert summary.counts["empty_documents"] == 2
    corpus[3]["id"] = "no vector"
    if where == "file":
        lacking = replace(job, encoder=None, queries=paths["queries"], out=str(tmp_path / "o.jsonl"), **change)
        with raises(ArgumentError, who="mine", got="'no vector'"):
            run(replace(lacking, corpus=write_lines(tmp_path / "c2.jsonl", corpus)))


def hash_vector(text: str) -> list[float]:
    from support.mining_jobs import encode

    return [float(value) for value in encode([text])[0]]


SOURCES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "helper module": (
        "from helper_of_this_test import factor\ndef encode(texts):\n    return vectors(texts) * factor\n"
        "encode.cache_key = 1\n",
        lambda folder: (folder / "helper_of_this_test.py").write_text("factor = -1.0\n"),
    ),
    "weights read at each call": (
        "def encode(texts):\n    return vectors(texts) * np.load(FOLDER + '/w.npy')\n"
        "encode.cache_files = [FOLDER + '/w.npy']\n",
        lambda folder: np.save(folder / "w.npy", np.full(8, -1.0)),
    ),
    "what it declares": (
        "import os\ndef encode(texts):\n    return vectors(texts) * (-1.0 if os.path.exists(FOLDER + '/v2') else 1.0)\n"
        "encode.cache_key = lambda: os.path.exists(FOLDER + '/v2')\n",
        lambda folder: (folder / "v2").write_text(""),
    ),
}


@pytest.mark.parametrize("what", list(SOURCES))
def test_other_code_or_declarations_change_the_key(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, change = SOURCES[what]
    head = (
        f"import zlib\nimport numpy as np\nFOLDER = {str(tmp_path)!r}\n"
        "def vectors(texts):\n    return np.stack([np.random.default_rng(zlib.crc32(t.encode())).standard_normal(8) "
        "for t in texts])\n"
    )
    (tmp_path / "encoder_of_this_test.py").write_text(head + source)
    (tmp_path / "helper_of_this_test.py").write_text("factor = 1.0\n")
    np.save(tmp_path / "w.npy", np.ones(8))
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = []
    for number in range(3):
        for module in ("encoder_of_this_test", "helper_of_this_test"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        keys.append(encoder_of_function("encoder_of_this_test:encode").key)
        assert keys[-1] is not None
        if number == 1:
            change(tmp_path)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_retrained_models_are_encoded_again(
    place: str, job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retrain, save under the same name with the same sizes and times (or to a hub), mine again."""
    library = pytest.importorskip("sentence_transformers", reason="needs the extra 'text'")
    load, folder = library.SentenceTransformer, tmp_path / "model"
    name = str(folder) if place == "folder" else "someone/model"
    monkeypatch.setattr(
        library, "SentenceTransformer", lambda given, device, revision: load(str(folder), device=device)
    )
    mined = []
    for seed in (0, 1):
        train_static(load, folder, seed)
        ours = replace(job, encoder=None, model=name, device="cpu")
        run(ours)
        mined.append(Path(job.out).read_bytes())
        run(replace(ours, out=str(tmp_path / f"fresh{seed}.jsonl")))
        assert mined[-1] == (tmp_path / f"fresh{seed}.jsonl").read_bytes()
    assert mined[0] != mined[1]


def train_static(load: Any, folder: Path, seed: int) -> None:
    """A model of one vector for each word, saved at the same moment whenever it is."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for row in make_rows()[1] for word in row["text"].split()})
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0} | {w: i + 1 for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = np.random.default_rng(seed).standard_normal((len(words) + 1, 16)).astype(np.float32)
    table = part_of_sentence_transformers("modules").StaticEmbedding(tokenizer, embedding_weights=weights)
    load(modules=[table], device="cpu").save(str(folder))
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))


def test_images_replaced_under_the_same_paths(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.png").write_bytes(bytes([number]) * 20)
    table = [
        {"id": f"{i}.png", "image": str(folder / f"{i}.png"), "positive": f"{(i + 1) % 12}.png"} for i in range(12)
    ]
    job = MineOptions(
        queries=write_lines(tmp_path / "q.jsonl", table),
        corpus=str(folder),
        out=str(tmp_path / "mined.jsonl"),
        encoder="test_mine_trust:encode_files",
        negatives="Uniform()",
        k=3,
        format="ids",
    )
    run(job)
    before = Path(job.out).read_bytes()
    for number in range(12):
        path = folder / f"{number}.png"
        times = path.stat()
        path.write_bytes(bytes([200 - 7 * number]) * 20)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    run(job)
    assert Path(job.out).read_bytes() != before
    run(replace(job, out=str(tmp_path / "fresh.jsonl")))
    assert Path(job.out).read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()


def encode_files(paths: list[str]) -> np.ndarray:
    return np.stack([np.random.default_rng(Path(path).read_bytes()[0]).standard_normal(8) for path in paths])


def test_one_process_at_a_time(job: MineOptions, tmp_path: Path) -> None:
    with locked(tmp_path / ".mined.jsonl.lock", "mine"), raises(InUse, who="mine", fix="--out"):
        run(job)
    assert not Path(job.out).exists()
    run(job)
    assert not list(tmp_path.glob(".*"))
    (tmp_path / ".mined.jsonl.lock").symlink_to(tmp_path / "corpus.jsonl")
    before = (tmp_path / "corpus.jsonl").read_bytes()
    with pytest.raises(FileError, match="lock file"):
        run(job)
    assert (tmp_path / "corpus.jsonl").read_bytes() == before


def test_output_and_manifest_of_two_jobs(job: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed between its output and its manifest: the audit refuses, the same command goes on."""
    run(job)
    original = os.replace

    def stop(first: Any, second: Any) -> None:
        if str(second).endswith("jsonl.manifest.json"):
            raise KeyboardInterrupt
        original(first, second)

    other = replace(job, k=2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            run(other)
    with raises(DataChanged, who="audit", what="its manifest"):
        hn.audit(mined=job.out)
    run(job)  # another job may come, too: the output is ours
    run(other)
    assert [row["negative_ids"] for row in lines(job.out)] == expected(k=2)
    assert hn.audit(mined=job.out, frontier=False).mined is not None


def lying_npz(path: Path, shape: str) -> None:
    """An archive whose array declares a shape that it does not have."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64
    if path.suffix == ".npy":
        path.write_bytes(content)
        return
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vectors.npy", content)


@pytest.mark.parametrize("shape", ["(1000000000000000, 4)", "(9" + "9" * 30 + ", 4)", "(-1, 4)", "(True, [)"])
@pytest.mark.parametrize("name", ["d.npz", "d.npy"])
def test_arrays_that_lie_about_their_size(name: str, shape: str, tmp_path: Path) -> None:
    lying_npz(tmp_path / name, shape)
    with pytest.raises(FileError, match=rf"mine needs .*{name}"):
        read_vectors(tmp_path / name)
    done = CliRunner().invoke(app, ["audit", str(tmp_path / name), "-o", str(tmp_path / "audit")])
    assert done.exit_code == 2, done.output
    assert name in done.stderr


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_gzip_bombs(newline: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardneg.io.tables._unpacked_bytes", 1 << 20)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        for _ in range(64):
            file.write((b" " * 4095 + (newline or b" ")) * 256)  # 64 MiB in 64 KiB
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(packed.getvalue())
    with raises(FileError, who="mine", path="bomb.jsonl.gz", fix="unpack it"):
        read_table(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nested.jsonl", "[" * 100_000),
        ("nested.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("digits.jsonl", '{"id": ' + "9" * 5000 + "}"),
        ("vector.jsonl", '{"embedding": [' + "9" * 400 + "]}"),
        ("grades.jsonl", '{"query-id": 1, "corpus-id": 2, "score": ' + "9" * 400 + "}"),
    ],
)
def test_numbers_and_nesting_beyond_python(name: str, content: str, tmp_path: Path) -> None:
    from hardneg.mining.judgements import read_grades

    (tmp_path / name).write_text(content)
    read = {"vector.jsonl": read_vectors, "grades.jsonl": read_grades}.get(name, read_table)
    with pytest.raises(ValueError, match="mine needs"):
        read(str(tmp_path / name))


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-12, 1.0, 1e19, 1e30, 2.0**120])
def test_the_cosine_of_far_numbers(scale: float) -> None:
    """Vectors of any length have the neighbours and the cosine of their directions."""

    rows = torch.randn(40, 8, dtype=torch.float64)
    grid = (rows * 64).round().clamp(-127, 127)
    grid[:, 0] = grid[:, 0].abs() + 1
    far = (grid * scale).float()
    if scale == 1e-42:  # what is left of numbers this small
        grid = far.double() / scale
    usual = hn.mine(hn.Keys(grid[:10]), hn.Keys(grid[10:]), torch.arange(10), "Uniform()", k=3)
    found = hn.mine(hn.Keys(far[:10]), hn.Keys(far[10:]), torch.arange(10), "Uniform()", k=3)
    torch.testing.assert_close(found.scores.double(), usual.scores, rtol=0, atol=1e-6)
    assert float((found.rows == usual.rows).float().mean()) > 0.9
    audited, wanted = (hn.audit(each, "Rank(0, 5)", frontier=False).rows[0] for each in (far, grid))
    assert audited.similarity == pytest.approx(wanted.similarity, abs=1e-6)


def test_zero_vectors_are_refused_by_row(tmp_path: Path) -> None:
    vectors = torch.randn(6, 4) * 1e-38
    vectors[4] = 0
    with raises(ArgumentError, who="audit", got="1 zero vectors in embeddings, first in row 4"):
        hn.audit(vectors, "Uniform()", frontier=False)
