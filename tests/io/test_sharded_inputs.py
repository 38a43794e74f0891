"""Inputs in shards and in the formats of others, beside the same rows in one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, FileError
from hardneg.io import tables
from hardneg.io.tables import holds_vectors, read_table, read_vectors
from hardneg.mining.inputs import from_beir
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.errors import raises

ROWS = [{"id": i, "text": f"text {i}"} for i in range(10)]
WHOLE = {"id": list(range(10)), "text": [f"text {i}" for i in range(10)]}


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_tables_in_shards(tmp_path: Path) -> None:
    for name, rows in (("b", ROWS[4:]), ("a", ROWS[:4])):
        write_lines(tmp_path / "lines" / f"{name}.jsonl", rows)
    assert read_table(tmp_path / "lines") == WHOLE
    write_lines(tmp_path / "lines" / "c.jsonl", [{"id": 1, "words": "x"}])
    with raises(FileError, who="mine", path="c.jsonl", got="which has ['id', 'words']"):
        read_table(tmp_path / "lines")


def test_parquet_data_sets(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs an extra")
    from pyarrow import dataset, parquet

    flat, parted = tmp_path / "flat", tmp_path / "parted"
    flat.mkdir()
    whole = pyarrow.table(WHOLE)
    for number, low in enumerate((0, 3)):
        parquet.write_table(whole.slice(low, 3 if not low else 7), flat / f"part-{number}.parquet")
    assert read_table(flat) == WHOLE
    with_language = whole.append_column("language", pyarrow.array(["de"] * 5 + ["en"] * 5))
    dataset.write_dataset(
        with_language, parted, format="parquet", partitioning=["language"], partitioning_flavor="hive"
    )
    found = read_table(parted)
    assert sorted(found["id"]) == WHOLE["id"]
    assert set(found["language"]) == {"de", "en"}


def test_json_arrays(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("\n " + json.dumps(ROWS, indent=1))
    assert read_table(tmp_path / "rows.json") == WHOLE
    (tmp_path / "rows.json").write_text("[1, 2]")
    with raises(FileError, who="mine", what="JSON objects", got="which contains other values"):
        read_table(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_text('[{"id": 1}')
    with raises(FileError, who="mine", got="which is not JSON"):
        read_table(tmp_path / "rows.json")
    (tmp_path / "rows.json").write_bytes(b'[{"id": "\xff"}]')
    with raises(FileError, who="mine", what="in UTF-8"):
        read_table(tmp_path / "rows.json")


def test_trec(tmp_path: Path) -> None:
    (tmp_path / "a.qrels").write_text("q1 0 d1 1\nq1\t0\td2  0\n\nq2 0 d1 2\n")
    found = read_table(tmp_path / "a.qrels")
    assert found == {"query_id": ["q1", "q1", "q2"], "doc_id": ["d1", "d2", "d1"], "relevance": ["1", "0", "2"]}
    (tmp_path / "a.run").write_text("q1 Q0 d1 1 9.5 bm25\nq1 Q0 d2 2 8 bm25\n")
    assert read_table(tmp_path / "a.run")["score"] == ["9.5", "8"]
    (tmp_path / "a.run").write_text("q1 Q0 d1 1 9.5 bm25\nq1 Q0 d2\n")
    with pytest.raises(FileError, match="3 in line 2"):
        read_table(tmp_path / "a.run")


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_vectors_in_shards(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_in_memory", most)
    whole = torch.randn(25, 4)
    for number, part in enumerate(torch.split(whole, 10)):
        np.save(tmp_path / f"{number}.npy", part.numpy())
    assert holds_vectors(tmp_path)
    vectors, ids = read_vectors(tmp_path)
    assert torch.equal(vectors, whole)
    assert ids is None
    np.save(tmp_path / "3.npy", np.zeros((2, 5), dtype=np.float32))
    with raises(ArgumentError, who="mine", got="[n, 4] of torch.float32, [n, 5] of torch.float32"):
        read_vectors(tmp_path)


def test_a_folder_larger_than_the_memory_is_joined_on_disk_if_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", np.ones((10, 4), dtype=np.float32))
    monkeypatch.setattr(tables, "_in_memory", 100)
    monkeypatch.setattr(np, "empty", None)  # more than the system allocates
    assert read_vectors(tmp_path)[0].shape == (20, 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 20 * 4 * 4 - 1}))
    with raises(FileError, who="mine", got="where 0.0 GiB are free"):
        read_vectors(tmp_path)


def test_safetensors_in_shards_with_ids(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch", reason="needs an extra").save_file
    for number in range(2):
        rows = torch.arange(3) + 3 * number
        save({"vectors": rows[:, None].float().repeat(1, 2), "ids": rows}, str(tmp_path / f"{number}.safetensors"))
    vectors, ids = read_vectors(tmp_path)
    assert ids == list(range(6))
    assert vectors[:, 0].tolist() == list(range(6))


def encode(texts: list[str]) -> np.ndarray:
    return np.stack([np.random.default_rng(len(text) + 7 * ord(text[-1])).standard_normal(6) for text in texts])


def test_a_beir_folder_is_mined_as_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    folder = tmp_path / "beir"
    documents = [{"_id": f"d{i}", "title": f"t{i}", "text": f"text {'x' * i}{i}"} for i in range(20)]
    write_lines(folder / "corpus.jsonl", documents)  # type: ignore[arg-type]
    write_lines(folder / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {'y' * i}{i}"} for i in range(6)])
    (folder / "qrels").mkdir()
    for split in ("test", "train"):
        lines = "".join(f"q{i}\td{i}\t1\n" for i in range(3 if split == "test" else 6))
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
    options = MineOptions(
        str(folder), str(tmp_path / "mined.jsonl"), encoder="test_sharded_inputs:encode", format="ids", k=2
    )
    assert from_beir(options).judgements == str(folder / "qrels" / "train.tsv")
    run(options)
    found = [json.loads(line) for line in Path(options.out).read_text().splitlines()]
    assert [row["query_id"] for row in found] == [f"q{i}" for i in range(6)]
    test = str(folder / "qrels" / "test.tsv")
    assert from_beir(MineOptions(str(folder), "out.jsonl", judgements=test)).judgements == test
