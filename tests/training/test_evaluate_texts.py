"""Evaluations of encoders of texts: against loops, in the formats that the sets come in, and on the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, FileError, HardnegError, NoFile
from hardneg.training.evaluation import benchmarks, logistic
from hardneg.training.evaluation.benchmarks import TextTask, evaluate_classification, read_classification
from hardneg.training.evaluation.retrieval import (
    RetrievalSet,
    evaluate_retrieval,
    read_beir,
    retrieval_figures,
)
from hardneg.training.evaluation.sts import Pair, evaluate_sts, read_sts, spearman, sts_figures
from hardneg.training.evaluation.texts import text_encoder
from support.errors import raises
from support.graphs import graph_file
from support.texts import text_file
from support.training_runs import FEW_ROWS
from support.training_runs import run as train_run

pytest.importorskip("scipy", reason="evaluations need the extra eval")
pytest.importorskip("ir_measures", reason="evaluations need the extra eval")

LETTERS = """
import torch

def letters(texts):
    return torch.tensor([[float(text.count(one)) for one in "abcdef"] for text in texts]) + 0.01
"""


@pytest.fixture(autouse=True)
def all_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs of other tests have one, in the same process."""
    monkeypatch.setattr(logistic, "MAX_CROSS_VALIDATED", FEW_ROWS)


def letters(texts: Sequence[str]) -> Tensor:
    return torch.tensor([[float(text.count(one)) for one in "abcdef"] for text in texts]) + 0.01


@pytest.fixture
def encoder_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(LETTERS)
    return f"{tmp_path / 'mine.py'}:letters"


def ranks(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def pearson(x: list[float], y: list[float]) -> float:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return top / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


class TestSTS:
    def test_spearman_is_the_correlation_of_ranks(self) -> None:
        first, second = [1.0, 2.0, 2.0, 5.0, 3.0], [0.1, 0.4, 0.3, 0.3, 0.9]
        assert spearman(first, second) == pytest.approx(pearson(ranks(first), ranks(second)), abs=1e-12)
        assert math.isnan(spearman([1.0, 1.0], [0.0, 1.0]))

    def test_all_and_mean_by_hand(self) -> None:
        pairs = [
            Pair("T", "x", 5.0, "aab", "aab"), Pair("T", "x", 1.0, "aab", "ccd"), Pair("T", "x", 2.0, "aab", "abc"),
            Pair("T", "y", 0.0, "ef", "eff"), Pair("T", "y", 4.0, "ef", "ee"), Pair("T", "y", 3.0, "ef", "ab"),
            Pair("U", "", 1.0, "a", "b"), Pair("U", "", 2.0, "a", "ab"), Pair("U", "", 2.5, "a", "a"),
        ]  # fmt: skip
        found = evaluate_sts(pairs, letters)

        def by_hand(chosen: list[Pair]) -> float:
            cosines = []
            for pair in chosen:
                u, v = letters([pair.first, pair.second]).double()
                cosines.append(float(u @ v / (u.norm() * v.norm())))
            return pearson(ranks([pair.score for pair in chosen]), ranks(cosines))

        x, y = by_hand(pairs[:3]), by_hand(pairs[3:6])
        assert found["T"].subsets == {"x": pytest.approx(x), "y": pytest.approx(y)}
        assert found["T"].mean == pytest.approx((x + y) / 2)
        assert found["T"].all == pytest.approx(by_hand(pairs[:6]))
        assert found["T"].all != pytest.approx(found["T"].mean)
        figures = sts_figures(found)
        assert figures["all"] == pytest.approx((found["T"].all + found["U"].all) / 2)
        assert json.loads(json.dumps(figures, allow_nan=False)) == figures

    def test_a_constant_encoder_has_no_correlation(self) -> None:
        figures = sts_figures(evaluate_sts([Pair("T", "x", s, "a", "b") for s in (1.0, 2.0)], letters))
        assert figures["all"] is None
        json.dumps(figures, allow_nan=False)

    def test_formats(self, tmp_path: Path) -> None:
        table = tmp_path / "sts.tsv"
        table.write_text(
            "task\tsubset\tsplit\tscore\tsentence1\tsentence2\n"
            'STS12\tMSRpar\ttest\t4.5\tan "a\tb\nSTSB\tx\tdev\t1\tc\td\nSICKR\tNEUTRAL\ttest\t3\te\tf\n'
        )
        assert read_sts(table) == [Pair("STS12", "MSRpar", 4.5, 'an "a', "b"), Pair("SICKR", "", 3.0, "e", "f")]
        assert read_sts(table, "dev") == [Pair("STSB", "x", 1.0, "c", "d")]
        folder = tmp_path / "all"
        (folder / "STS12-en-test").mkdir(parents=True)
        (folder / "STS12-en-test" / "STS.input.OnWN.txt").write_text("a\tb\nc\td\n")
        (folder / "STS12-en-test" / "STS.gs.OnWN.txt").write_text("4.0\n\n")  # the second pair has no score
        (folder / "STSBenchmark").mkdir()
        (folder / "STSBenchmark" / "sts-test.csv").write_text("news\tMSR\t2012\t0001\t2.5\te\tf\tsource\n")
        (folder / "SICK").mkdir()
        (folder / "SICK" / "SICK.txt").write_text(
            "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\tSemEval_set\n"
            "1\tg\th\t3.5\tNEUTRAL\tTRIAL\n2\ti\tj\t1.0\tNEUTRAL\tTEST\n"
        )
        assert read_sts(folder) == [
            Pair("SICK", "", 1.0, "i", "j"),
            Pair("STS12-en-test", "OnWN", 4.0, "a", "b"),
            Pair("STSB", "news", 2.5, "e", "f"),
        ]

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("sts.tsv", "score\tsentence1\tsentence2\n1\ta\tb\n"),
            ("sts-test.csv", "news\tMSR\t2012\t0001\t2.5\te\tf\n"),
            ("STS.input.OnWN.txt", "a\tb\n"),
        ],
    )
    def test_pairs_are_of_the_split_test_unless_it_is_said(self, name: str, content: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text(content)
        (tmp_path / "STS.gs.OnWN.txt").write_text("4.0\n")
        path = tmp_path if name.startswith("STS") else tmp_path / name
        assert len(read_sts(path)) == 1
        with pytest.raises(ArgumentError) as error:
            read_sts(path, "dev")
        assert "'dev'" in error.value.what
        assert "a table whose column split contains 'dev'" in error.value.fix

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("score\tsentence1\n1\ta\n", "a column of .*sentence2"),
            ("score\tsentence1\tsentence2\nnone\ta\tb\n", "a score and two sentences in each row"),
            ("split\tscore\tsentence1\tsentence2\ndev\t1\ta\tb\n", "scored pairs of the split 'test', got none"),
        ],
    )
    def test_wrong_tables_are_named(self, content: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "sts.tsv").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_sts(tmp_path / "sts.tsv")


class TestRetrieval:
    def test_figures_by_a_loop(self) -> None:
        generator = torch.Generator().manual_seed(0)
        queries, documents = (torch.randn(n, 6, generator=generator) for n in (7, 150))
        grades = {
            f"q{i}": {f"d{j}": int(torch.randint(0, 3, (), generator=generator)) for j in range(i, 150, 9)}
            for i in range(7)
        }
        found = retrieval_figures(
            queries, documents, list(grades), [f"d{j}" for j in range(150)], grades, excluded=[(2, 5)]
        )
        ndcg, mrr, recall = 0.0, 0.0, 0.0
        for i, (query, judged) in enumerate(grades.items()):
            cosines = torch.nn.functional.cosine_similarity(queries[i].double(), documents.double())
            order = [j for j in cosines.argsort(descending=True).tolist() if (i, j) != (2, 5)]
            gains = [judged.get(f"d{j}", 0) for j in order]
            best = sorted(judged.values(), reverse=True)
            ideal = sum(g / math.log2(r + 2) for r, g in enumerate(best[:10]))
            ndcg += sum(g / math.log2(r + 2) for r, g in enumerate(gains[:10])) / ideal / 7
            mrr += next((1 / (r + 1) for r, g in enumerate(gains[:10]) if g > 0), 0.0) / 7
            recall += sum(g > 0 for g in gains[:100]) / sum(g > 0 for g in judged.values()) / 7
            assert query == f"q{i}"
        assert found["ndcg@10"] == pytest.approx(ndcg, abs=1e-9)
        assert found["mrr@10"] == pytest.approx(mrr, abs=1e-9)
        assert found["recall@100"] == pytest.approx(recall, abs=1e-9)
        assert found["num_queries"] == 7

    def test_a_beir_folder(self, tmp_path: Path) -> None:
        write_beir(tmp_path)
        data = read_beir(tmp_path)
        assert data == RetrievalSet(
            {"1": "aab", "2": "ef"}, {"d1": "A aab", "d2": "ccd", "2": "ef"}, {"1": {"d1": 2, "d2": 0}, "2": {"d2": 1}}
        )
        found = evaluate_retrieval(data, letters)
        # The document "2" is its query; of the two others, neither shares a letter with it.
        assert found["recall@10"] == 1.0
        assert found["ndcg@10"] >= 0.5 + 0.5 / math.log2(3)
        with raises(NoFile, who="evaluate", what="with qrels/dev.tsv"):
            read_beir(tmp_path, "dev")

    def test_queries_without_a_relevant_document_are_left_out(self) -> None:
        documents = torch.eye(3)
        grades = {"q0": {"d0": 1}, "q1": {"d1": 0, "d2": 0}, "q2": {"d0": 2}}
        names = [f"d{j}" for j in range(3)]
        found = retrieval_figures(documents[[0, 1, 0]], documents, list(grades), names, grades)
        assert found["ndcg@10"] == found["mrr@10"] == found["recall@10"] == 1.0
        assert (found["num_queries"], found["num_without_relevant"]) == (2, 1)
        with pytest.raises(ArgumentError) as caught:
            retrieval_figures(documents[:1], documents, ["q1"], names, {"q1": grades["q1"]})
        assert caught.value.who == "evaluate"

    def test_the_command_counts_queries_without_a_relevant_document(self, encoder_file: str, tmp_path: Path) -> None:
        write_beir(tmp_path)
        (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\t1\n2\td2\t0\n")
        found = json.loads(run(encoder_file, "--beir", str(tmp_path), "--json").output)["retrieval"]
        assert (found["num_queries"], found["num_without_relevant"], found["ndcg@10"]) == (1, 1, 1.0)
        assert "num_without_relevant" in run(encoder_file, "--beir", str(tmp_path)).output

    def test_a_judgement_without_its_query_is_named(self, tmp_path: Path) -> None:
        write_beir(tmp_path)
        (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n9\td1\t1\n")
        with raises(ArgumentError, who="evaluate", got="none for '9' (1 missing in total)"):
            read_beir(tmp_path)


def write_beir(folder: Path) -> None:
    documents = [("d1", "A", "aab"), ("d2", "", "ccd"), ("2", "", "ef")]
    lines = [json.dumps({"_id": one, "title": title, "text": text}) for one, title, text in documents]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    queries = [("1", "aab"), ("2", "ef"), ("3", "without a judgement")]
    (folder / "queries.jsonl").write_text("\n".join(json.dumps({"_id": one, "text": text}) for one, text in queries))
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\td1\t2\n1\td2\t0\n2\td2\t1\n")


def task_of(splits: tuple[str, ...], pairs: bool = False) -> TextTask:
    """Texts of a or of b, with a letter that says nothing; of pairs, whether both are of the same."""
    rows = [("a" * (1 + i % 3) if i % 2 else "b" * (1 + i % 3)) + "cdef"[i % 4] for i in range(40)]
    if pairs:
        texts = tuple((row, "aa" if i % 4 < 2 else "bb") for i, row in enumerate(rows))
        return TextTask(texts, tuple(str((i % 2) == (i % 4 < 2)) for i in range(40)), splits * (40 // len(splits)))
    return TextTask(tuple((row,) for row in rows), tuple("ab"[i % 2] for i in range(40)), splits * (40 // len(splits)))


class TestClassification:
    def test_folds_and_test_splits(self) -> None:
        split = task_of(("train", "test", "dev", "train", "train"))
        tasks = {
            "folds": task_of(("all",)),
            "split": split,
            "pairs": task_of(("train", "test", "train", "dev", "train"), True),
        }
        found = evaluate_classification(tasks, letters)
        assert [found[name]["accuracy"] for name in tasks] == [1.0, 1.0, 1.0]
        assert found["folds"]["folds"] == 10
        assert found["folds"]["deviation"] == 0.0
        assert "folds" not in found["split"]
        constant = evaluate_classification({"split": split}, lambda texts: torch.ones(len(texts), 2))
        assert constant["split"]["accuracy"] == 0.5
        assert found["pairs"]["f1"] == 1.0
        assert "f1" not in found["split"], "F1 is that of tasks of pairs, as of MSRP"

    def test_f1_is_that_of_the_paraphrases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """2 tp / (2 tp + fp + fn) of the class that sorts last, counted one by one."""
        guesses = torch.tensor([1, 1, 0, 0, 1, 0, 0, 1])
        labels = ["1", "0", "1", "0", "1", "0", "0", "0"]
        monkeypatch.setattr(benchmarks, "linear_predict", lambda x, y, test: guesses)
        texts = tuple((f"a{i}", f"b{i}") for i in range(16))
        task = TextTask(texts, (*labels, *labels), ("train",) * 8 + ("test",) * 8)
        found = evaluate_classification({"MSRP": task}, lambda some: torch.randn(len(some), 3))["MSRP"]
        counts = [0, 0, 0]
        for guess, label in zip(guesses.tolist(), labels, strict=True):
            counts[0] += guess == 1 and label == "1"
            counts[1] += guess == 1 and label == "0"
            counts[2] += guess == 0 and label == "1"
        assert found["f1"] == 2 * counts[0] / (2 * counts[0] + counts[1] + counts[2])
        assert found["accuracy"] == 5 / 8

    @pytest.mark.parametrize(
        ("splits", "message"),
        [
            (("train", "Test"), "splits of T among train, dev, validation, test, all, got 'Test'"),
            (("test",), "rows of T to train on, got test rows only; add rows of the split train"),
        ],
    )
    def test_splits_that_are_not_known_or_not_there_are_named(self, splits: tuple[str, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            evaluate_classification({"T": task_of(splits)}, letters)

    def test_empty_texts_are_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "cls.tsv").write_text(
            "task\tsplit\tlabel\ttext\ttext2\nMR\tall\t0\ta\t\nMR\tall\t1\t \t\nMRPC\ttest\t1\ta\tb\n"
        )
        found = read_classification(tmp_path / "cls.tsv")
        assert found["MR"] == TextTask((("a",),), ("0",), ("all",), skipped=1)
        assert found["MRPC"] == TextTask((("a", "b"),), ("1",), ("test",), skipped=0)
        with raises(ArgumentError, who="evaluate", got="only the label '0'"):
            evaluate_classification(found, letters)

    def test_empty_texts_of_tasks_that_are_numbers_are_counted(self, tmp_path: Path) -> None:
        rows = [{"task": 1, "label": 0, "text": "a"}, {"task": 1, "label": 1, "text": ""}]
        (tmp_path / "cls.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert read_classification(tmp_path / "cls.jsonl")["1"].skipped == 1


class TestEncoders:
    def test_a_table_of_texts_and_embeddings(self, tmp_path: Path) -> None:
        path = tmp_path / "vectors.jsonl"
        path.write_text("\n".join(json.dumps({"text": t, "embedding": [len(t), 1.0]}) for t in ("a", "bb")))
        encoder = text_encoder(str(path))
        assert encoder.texts(["bb", "a", "bb"]).tolist() == [[2.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
        with raises(ArgumentError, who="evaluate", what="vectors.jsonl", got="none for 'ccc' (1 missing in total)"):
            encoder.queries(["a", "ccc"])

    def test_sentence_transformers_and_transformers(self, tmp_path: Path) -> None:
        pytest.importorskip("sentence_transformers", reason="needs the extra text")
        from support.tiny_bert import texts, tiny_bert

        model = tiny_bert(tmp_path)
        model.save(str(tmp_path / "st"))
        some = texts(5, seed=1)
        expected = model.encode(some, convert_to_tensor=True)
        torch.testing.assert_close(text_encoder(f"st:{tmp_path / 'st'}", device="cpu").texts(some), expected)
        (plain,) = tmp_path.glob("bert-*")
        torch.testing.assert_close(text_encoder(f"hf:{plain}", device="cpu").texts(some), expected)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nothing", "an encoder of texts: st:PATH"),
            ("no_such_module_here:f", "a module that exists"),
            ("missing.py:f", "a Python file that exists"),
        ],
    )
    def test_unknown_encoders_are_named(self, name: str, message: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            text_encoder(name)

    def test_a_function_that_gives_something_else_is_named(self) -> None:
        with raises(ArgumentError, who="The encoder", got="shape (1, 3)"):
            evaluate_sts([Pair("T", "", 1.0, "a", "b")], lambda texts: torch.ones(1, 3))
        with pytest.raises(ValueError, match="finite embeddings"):
            evaluate_sts([Pair("T", "", 1.0, "a", "b")], lambda texts: torch.full((2, 3), torch.nan))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["evaluate", *arguments])


def test_the_command_prints_a_table_and_json(encoder_file: str, tmp_path: Path) -> None:
    write_beir(tmp_path)
    (tmp_path / "sts.tsv").write_text("score\tsentence1\tsentence2\n5\ta\taa\n1\ta\tb\n3\ta\tab\n")
    rows = [f"{label}\t{label * 2}" for label in "ab" for _ in range(10)]
    (tmp_path / "cls.tsv").write_text("\n".join(["label\ttext", *rows]))
    files = ("--sts", str(tmp_path / "sts.tsv"), "--beir", str(tmp_path), "--classification", str(tmp_path / "cls.tsv"))
    shown = run(encoder_file, *files)
    assert shown.exit_code == 0, shown.output
    assert all(word in shown.output for word in ("Spearman", "100.00", "ndcg@10", "over 10 folds"))
    found = json.loads(run(encoder_file, *files, "--json").output)
    assert found["sts"]["tasks"]["sts"] == {"all": 1.0, "mean": 1.0, "pairs": 3, "subsets": {"": 1.0}}
    assert found["retrieval"]["recall@10"] == 1.0
    assert found["classification"]["cls"]["accuracy"] == 1.0
    wrong = run("st", *files)
    assert wrong.exit_code == 2
    assert "an encoder of texts" in wrong.output


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("SICK.txt", b"score\tsentence1\tsentence2\n1\ta\n", "3 fields in each line.* has 2"),
        ("SICK.txt", b"", "a column of"),
        ("SICK.txt", b"score\tsentence1\tsentence2\n1\t\xe9\tb\n", "text in UTF-8"),
        ("sts-test.csv", b"\xff\n", "text in UTF-8"),
        ("sts.tsv", b"score\tsentence1\tsentence2\ninf\ta\tb\n", "a score and two sentences"),
    ],
)
def test_malformed_sts_files_are_reported(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HardnegError, match=match):
        read_sts(tmp_path / name)


def test_a_score_for_each_pair(tmp_path: Path) -> None:
    (tmp_path / "STS.input.a.txt").write_text("a\tb\nc\td\n")
    (tmp_path / "STS.gs.a.txt").write_text("1\n")
    with raises(FileError, who="evaluate", path="STS.gs.a.txt", got="which has 1 for 2 lines in STS.input.a.txt"):
        read_sts(tmp_path)


def test_a_run_without_a_train_split_is_evaluated_or_says_what_to_give(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    short = {"epochs": 1, "batch_size": 16, "dim": 8, "device": "cpu"}
    train_run("simcse", tmp_path / "texts", {"data": text_file(tmp_path / "a.txt"), **short})
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "texts")])
    assert done.exit_code != 0
    assert "give --on DATA with labels, or for texts --sts FILE, --beir FOLDER or" in " ".join(done.output.split())
    result = train_run("graphcl", tmp_path / "graphs", {"data": graph_file(tmp_path / "a.npz", 32), **short})
    assert "SVM accuracy" in CliRunner().invoke(app, ["evaluate", str(tmp_path / "graphs")]).output
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "graphs"), "--json"])
    assert json.loads(done.output)["svm"] == result["svm"]


def test_embeddings_as_json(tmp_path: Path) -> None:
    from support.vectors import save_embeddings

    y = torch.arange(20) % 2
    save_embeddings(tmp_path / "x.npz", torch.eye(2)[y], y, torch.eye(2)[y], y)
    found = json.loads(run(str(tmp_path / "x.npz"), "--json").output)
    assert (found["linear"], found["knn"]) == (1.0, 1.0)
