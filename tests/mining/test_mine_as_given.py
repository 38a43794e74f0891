"""Inputs as people have them: whole ids as 3.0, .txt judgements, DataFrames, BEIR without titles; errors name a fix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError, NoFile
from hardneg.io.functions import loading_model
from hardneg.io.tables import read_table
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.mining.pair_scores import pair_scorer
from support.mining_jobs import encode, lines, write_lines

Z = torch.nn.functional.normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
ANCHORS, POSITIVES = [f"question {i}" for i in range(20)], [f"answer {i}" for i in range(20)]


@pytest.fixture
def judged(tmp_path: Path) -> MineOptions:
    """Queries and documents with the ids 0 to 19; document i is the answer to query i."""
    queries = [{"id": i, "query": text} for i, text in enumerate(ANCHORS)]
    corpus = [{"id": i, "text": text} for i, text in enumerate(POSITIVES)]
    judgements = [{"query_id": i, "doc_id": i} for i in range(20)]
    return MineOptions(
        queries=write_lines(tmp_path / "queries.jsonl", queries),
        corpus=write_lines(tmp_path / "corpus.jsonl", corpus),
        judgements=write_lines(tmp_path / "judgements.jsonl", judgements),
        out=str(tmp_path / "mined.jsonl"),
        encoder="support.mining_jobs:encode",
        format="ids",
    )


def mined(options: MineOptions, **changes: Any) -> list[dict[str, Any]]:
    changed = replace(options, **changes)
    run(changed)
    return lines(changed.out)


def other(options: MineOptions, text: str, name: str) -> dict[str, str]:
    """Judgements in another form, and another output."""
    path = Path(options.out).parent / name
    path.write_text(text)
    return {"judgements": str(path), "out": f"{path}.jsonl"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("numbers.jsonl", "".join(json.dumps({"query_id": float(i), "doc_id": float(i)}) + "\n" for i in range(20))),
        ("texts.tsv", "query-id\tcorpus-id\tscore\n" + "".join(f"{i}.0\t{i}.0\t1\n" for i in range(20))),
        ("trec.txt", "".join(f"{i} 0 {i} 1\n" for i in range(20))),
        ("tabs.txt", "query-id\tcorpus-id\tscore\n" + "".join(f"{i}\t{i}\t1\n" for i in range(20))),
        ("commas.txt", "query_id,doc_id\n" + "".join(f"{i},{i}\n" for i in range(20))),
    ],
)
def test_judgements_with_whole_floats_and_in_txt_files_give_the_same_negatives(
    judged: MineOptions, name: str, text: str
) -> None:
    assert mined(judged, **other(judged, text, name)) == mined(judged)


def test_an_id_3_0_of_its_own_is_not_the_id_3(judged: MineOptions, tmp_path: Path) -> None:
    corpus = [{"id": str(i), "text": text} for i, text in enumerate(POSITIVES)] + [{"id": "3.0", "text": "another"}]
    changed = other(judged, "query_id,doc_id\n3,3.0\n4,4.0\n", "j.csv")
    found = mined(judged, corpus=write_lines(tmp_path / "more.jsonl", corpus), **changed)
    assert [row["positive_ids"] for row in found] == [["3.0"], ["4"]]


def test_a_fraction_is_no_id(judged: MineOptions) -> None:
    rows = "".join(json.dumps({"query_id": i + 0.5, "doc_id": i}) + "\n" for i in range(20))
    with pytest.raises(ArgumentError) as error:
        mined(judged, **other(judged, rows, "half.jsonl"))
    assert "0.5" in str(error.value.got)


def test_a_txt_file_that_is_no_table_names_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a sentence\nanother sentence\n")
    with pytest.raises(ArgumentError) as error:
        read_table(path)
    assert ".tsv" in str(error.value.fix)


@pytest.mark.parametrize(
    "positives",
    [
        [float(i) for i in range(20)],
        [[float(i)] for i in range(20)],
        torch.arange(20.0),
        np.arange(20.0),
        np.array([str(i) for i in range(20)], dtype=object),
    ],
)
def test_positives_may_be_whole_floats(positives: Any) -> None:
    corpus: Any = Z
    if isinstance(positives, np.ndarray) and positives.dtype == object:
        corpus = hn.Keys(Z, ids=[str(i) for i in range(20)])
    found = hn.mine(Z + 0.01, corpus, positives, "Uniform()", 2)
    assert torch.equal(found.rows, hn.mine(Z + 0.01, Z, list(range(20)), "Uniform()", 2).rows)


def test_ids_of_keys_may_be_whole_floats() -> None:
    for ids in (np.arange(20.0), [float(i) for i in range(20)]):
        given = hn.Keys(Z, ids=ids).ids
        assert given is not None
        assert given.tolist() == list(range(20))


@pytest.mark.parametrize("wrong", [None, 3.5, "text", float("nan")])
def test_what_is_no_id_among_positives_is_named_with_its_query(wrong: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        hn.mine(Z, Z, [0, 1, wrong, *range(3, 20)], "Uniform()", 2)
    assert repr(wrong) in str(error.value.got)
    assert "query 2" in str(error.value.got)
    assert error.value.fix


def test_a_number_among_positives_is_named_with_its_row_and_fix(tmp_path: Path) -> None:
    rows = [{"anchor": a, "positive": p} for a, p in zip(ANCHORS, POSITIVES, strict=True)]
    rows[3]["positive"] = 7  # type: ignore[assignment]
    queries = write_lines(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(ArgumentError) as error:
        run(MineOptions(queries, out=str(tmp_path / "mined.jsonl"), encoder="support.mining_jobs:encode"))
    assert str(error.value.got) == "7 in row 3"
    assert all(word in str(error.value.fix) for word in ('"7"', "corpus"))


@pytest.mark.parametrize("titles", [(), range(20), range(0, 20, 2), range(1, 20)])
def test_a_beir_folder_may_lack_titles(titles: Any, tmp_path: Path, judged: MineOptions) -> None:
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": str(i), "text": text} for i, text in enumerate(POSITIVES)]
    for i in titles:
        rows[i]["title"] = None if i % 4 else ""  # type: ignore[assignment]
    write_lines(folder / "corpus.jsonl", rows)
    write_lines(folder / "queries.jsonl", [{"_id": str(i), "text": text} for i, text in enumerate(ANCHORS)])
    (folder / "qrels" / "train.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{i}\t{i}\t1\n" for i in range(20))
    )
    found = mined(judged, queries=str(folder), corpus=None, judgements=None, out=str(tmp_path / "of_beir.jsonl"))
    assert [list(map(int, row["negative_ids"])) for row in found] == [row["negative_ids"] for row in mined(judged)]


def test_none_in_a_dataset_is_named_with_its_row_and_a_fix() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
    data = datasets.Dataset.from_dict({"anchor": ANCHORS, "positive": [*POSITIVES[:-1], None]})
    with pytest.raises(ArgumentError) as error:
        hn.mine(data, model=encode, k=2)
    assert "row 19" in str(error.value.got)
    assert all(word in str(error.value.fix) for word in ("filter", "'positive'"))


def test_none_instead_of_queries_or_a_data_set_is_named() -> None:
    for options in ({}, {"model": encode}):
        with pytest.raises(ArgumentError) as error:
            hn.mine(None, **options)
        assert error.value.got == "None"
        assert error.value.fix


def test_a_fraction_among_positives_is_named_with_a_fix(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"anchor": a, "positive": p} for a, p in zip(ANCHORS, POSITIVES, strict=True)]
    rows[3]["positive"] = 7.5
    queries = write_lines(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(ArgumentError) as error:
        run(MineOptions(queries, out=str(tmp_path / "mined.jsonl"), encoder="support.mining_jobs:encode"))
    assert "7.5" in str(error.value.got)
    assert error.value.fix


def test_a_series_of_texts_is_a_corpus() -> None:
    pandas = pytest.importorskip("pandas", reason="comes with the extra 'text'")
    options: dict[str, Any] = {"model": encode, "k": 2, "verbose": False}
    more = ["another text", "and one more"]
    found = hn.mine(_pairs(), corpus=pandas.Series(more), **options)
    assert found.to_dict() == hn.mine(_pairs(), corpus=more, **options).to_dict()


def test_data_frames_are_data_sets_and_vectors() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
    pandas = pytest.importorskip("pandas", reason="comes with the extra 'text'")
    columns = {"anchor": ANCHORS, "positive": POSITIVES}
    found = hn.mine(pandas.DataFrame(columns), model=encode, k=2, verbose=False)
    assert found.to_dict() == hn.mine(datasets.Dataset.from_dict(columns), model=encode, k=2, verbose=False).to_dict()
    table = found.to_pandas()
    assert hn.audit(table, model=encode).row("mined") == hn.audit(found, model=encode).row("mined")
    frame, numbers = pandas.DataFrame(Z.numpy()), pandas.Series(range(20))
    expected = hn.mine(Z + 0.01, Z, list(range(20)), "Uniform()", 2).rows
    assert torch.equal(hn.mine(frame + 0.01, frame, numbers, "Uniform()", 2).rows, expected)
    assert torch.equal(hn.mine(frame + 0.01, hn.Keys(frame, ids=numbers), numbers, "Uniform()", 2).rows, expected)


def test_with_ids_takes_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="comes with the extra 'text'")
    datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
    pytest.importorskip("sentence_transformers", reason="needs the extra 'text'")
    from hardneg.integrations.sentence_transformers import with_ids

    columns = {"anchor": ANCHORS, "positive": POSITIVES}
    assert with_ids(pandas.DataFrame(columns)).to_dict() == with_ids(datasets.Dataset.from_dict(columns)).to_dict()


@pytest.mark.parametrize("path", ["./no/model", "/no/such/model", "~/no-such-model", "no/such/model"])
def test_a_model_folder_that_does_not_exist_is_not_looked_for_elsewhere(path: str) -> None:
    with pytest.raises(NoFile) as error, loading_model("mine", path):
        raise AssertionError("not loaded")
    assert str(error.value.path) == str(Path(path))
    assert error.value.fix


def test_a_model_beside_which_folders_exist_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for load in (lambda: pair_scorer("models/mine"), lambda: hn.mine(_pairs(), model="models/mine", k=2)):
        with pytest.raises(NoFile):
            load()


def _pairs() -> Any:
    datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
    return datasets.Dataset.from_dict({"anchor": ANCHORS, "positive": POSITIVES})


def test_a_name_that_the_hub_cannot_give_is_said_to_be_neither_folder_nor_known() -> None:
    with pytest.raises(NoFile) as error, loading_model("mine", "models/mine"):
        raise OSError("We couldn't connect to the hub")
    assert "folder" in error.value.what
    assert isinstance(error.value.__cause__, OSError)


def test_a_model_folder_that_exists_keeps_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no weights") as error, loading_model("mine", str(tmp_path)):
        raise OSError("no weights")
    assert not isinstance(error.value, NoFile)
