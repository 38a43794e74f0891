"""Ids of texts in the column label, and what the loss makes of them, against plain loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import ArgumentError, HardnegWarning, forget_warnings
from hardneg.integrations.sentence_transformers import NegativesLoss, known_positives, with_ids
from hardneg.mining.job import run
from support.errors import raises
from support.mining_jobs import make_job
from support.operations import Operations

datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
TEMPERATURE = 0.1


def made(**columns: list[Any]) -> Any:
    return datasets.Dataset.from_dict(columns)


def test_equal_texts_have_equal_ids_and_anchors_come_first() -> None:
    data = with_ids(made(anchor=["a", "b", "a"], positive=["x", "y", "z"], negative=["y", "a", "w"]))
    assert data.column_names == ["anchor", "positive", "negative", "label"]
    assert list(data["label"]) == [[0, 0, 2, 3], [1, 1, 3, 0], [0, 0, 4, 5]]
    assert list(with_ids(made(anchor=["a"], positive=["x"]), start=7)["label"]) == [[7, 7, 8]]


def test_lists_of_negatives_become_columns_and_missing_ones_are_minus_one() -> None:
    data = with_ids(made(anchor=["a", "b"], positive=["x", "y"], negative=[["u", "v"], []], other=[None, "u"]))
    assert data.column_names == ["anchor", "positive", "negative_1", "negative_2", "other", "label"]
    assert list(data["negative_2"]) == ["v", ""]
    assert list(data["other"]) == ["", "u"]
    assert list(data["label"]) == [[0, 0, 2, 4, 5, -1], [1, 1, 3, -1, -1, 4]]


def test_several_data_sets_share_their_ids_and_groups_are_kept() -> None:
    both = datasets.DatasetDict(
        one=made(anchor=["a"], positive=["x"], label=[5]), two=made(question=["b"], answer=["x"], topic=[3])
    )
    assert list(with_ids(both["two"], group="topic")["label"]) == [[3, 0, 1]]
    shared = with_ids(datasets.DatasetDict(one=both["one"], two=both["two"].remove_columns("topic")))
    assert [list(part["label"]) for part in shared.values()] == [[[5, 0, 2]], [[1, 1, 2]]]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (made(anchor=["a"], positive=["x"], score=[0.5]), {}, "a data set without other labels or scores"),
        (made(anchor=["a"], positive=["x"], label=[0.5]), {}, "whole numbers as groups"),
        (made(anchor=["a"], positive=["x"], label=[[0, 0, 1]]), {}, "have ids already"),
        (made(anchor=["a"], positive=[""]), {}, "needs texts"),
        (made(anchor=["a"], positive=[["x"]]), {}, "needs texts"),
        (made(anchor=["a"], positive=["x"], negative=[3]), {}, "texts, or None"),
        (made(anchor=["a"]), {}, "columns anchor, positive"),
        (made(anchor=["a"], positive=["x"]), {"start": -1}, "start of 0 or more"),
        (made(anchor=["a"], positive=["x"]), {"start": 2**31 - 1}, "ids below"),
        (made(anchor=["a"], positive=["x"]), {"group": "topic"}, "a column among"),
        (made(anchor=["a"], positive=["x"]).to_iterable_dataset(), {}, "known length"),
    ],
)
def test_errors(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_ids(data, **options)


@pytest.mark.parametrize("kind", ["triplet", "n-tuple"])
def test_the_ids_of_mined_rows_are_ids_and_not_texts(kind: str, tmp_path: Path) -> None:
    """As `hardneg mine --ids` writes them: query_id and document_ids beside the texts."""
    run(replace(make_job(tmp_path), format=kind, ids=True))
    mined = datasets.Dataset.from_json(str(tmp_path / "mined.jsonl"), cache_dir=str(tmp_path / "cache"))
    texts = [name for name in mined.column_names if name not in ("query_id", "document_ids")]
    data = with_ids(mined)
    assert data.column_names == [*texts, "label"]
    assert list(data["label"]) == list(with_ids(mined.select_columns(texts))["label"])


@pytest.mark.parametrize("kind", ["ids", "labeled-pair", "labeled-list"])
@pytest.mark.parametrize("ids", [False, True])
def test_mined_rows_of_other_formats_are_refused_with_the_formats_to_use(kind: str, ids: bool, tmp_path: Path) -> None:
    run(replace(make_job(tmp_path), format=kind, ids=ids))
    mined = datasets.Dataset.from_json(str(tmp_path / "mined.jsonl"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ArgumentError) as caught:
        with_ids(mined)
    assert "--format triplet" in (caught.value.fix or "")


@pytest.mark.parametrize("kind", ["triplet", "n-tuple"])
def test_mined_scores_are_to_be_removed_by_name(kind: str, tmp_path: Path) -> None:
    run(replace(make_job(tmp_path), format=kind, ids=True, scores=True))
    mined = datasets.Dataset.from_json(str(tmp_path / "mined.jsonl"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ArgumentError) as caught:
        with_ids(mined)
    assert "remove_columns(['scores'])" in (caught.value.fix or "")
    assert "label" in with_ids(mined.remove_columns(["scores"])).column_names


def test_labels_that_may_say_which_pairs_match_warn() -> None:
    forget_warnings()
    with pytest.warns(HardnegWarning) as caught:
        with_ids(made(anchor=["how many", "who"], positive=["a text", "another"], label=[0, 1]))
    assert [warning.message.kind for warning in caught] == ["with_ids.labels"]  # type: ignore[union-attr]
    with pytest.raises(ArgumentError) as refused:
        with_ids(made(anchor=["who", "who"], positive=["a text", "another"], label=[0, 1]))
    assert "label 1" in (refused.value.fix or "")


def test_rows_are_the_same_if_their_ids_or_their_texts_are() -> None:
    """Texts of one id may differ by row (a prefix, a cut); a query and a document of one id are different."""
    data = with_ids(
        made(
            anchor=["a", "a!", "b", "b"],
            positive=["x", "x!", "y", "z"],
            negative=[["u", "v"], ["y!"], [], ["x"]],
            query_id=["7", "7", "8", "9"],
            document_ids=[["d", "5", "7"], ["d", "e"], ["e"], ["f", "g"]],
        )
    )
    assert data.column_names == ["anchor", "positive", "negative_1", "negative_2", "label"]
    assert list(data["label"]) == [[0, 0, 2, 5, 6], [0, 0, 2, 3, -1], [1, 1, 3, -1, -1], [1, 1, 4, 2, -1]]


def test_ids_of_one_part_are_not_those_of_another() -> None:
    part = made(anchor=["a"], positive=["x"], query_id=[0], document_ids=[[0]])
    other = made(anchor=["b"], positive=["y"], query_id=[0], document_ids=[[0]])
    found = with_ids(datasets.DatasetDict(one=part, two=other))
    assert [list(each["label"]) for each in found.values()] == [[[0, 0, 2]], [[1, 1, 3]]]


def labels_by_a_loop(parts: list[dict[str, list[Any]]]) -> list[list[list[int]]]:
    """Number one text after another: by its id if that is known, else by its text."""
    of_text: dict[str, int] = {}
    of_id: dict[Any, int] = {}

    def number(text: str | None, key: Any) -> int:
        if not text:
            return -1
        found = of_id.get(key, of_text.get(text, max((*of_text.values(), *of_id.values(), -1)) + 1))
        of_text.setdefault(text, found)
        if key[-1] is not None:
            of_id.setdefault(key, found)
        return found

    anchors = [
        [number(a, (p, "query", i)) for a, i in zip(part["anchor"], part["query_id"], strict=True)]
        for p, part in enumerate(parts)
    ]
    found = []
    for p, part in enumerate(parts):
        texts = [[x, *rest] for x, rest in zip(part["positive"], part["negative"], strict=True)]
        given = [dict(zip([k for k, x in enumerate(row) if x], ids, strict=True))
                 for row, ids in zip(texts, part["document_ids"], strict=True)]  # fmt: skip
        rows: list[list[int]] = [[a, a] for a in anchors[p]]
        for k in range(max(map(len, texts))):
            for row, own, ids in zip(rows, texts, given, strict=True):
                row.append(number(own[k] if k < len(own) else None, (p, "document", ids.get(k))))
        found.append(rows)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_ids_of_random_data_sets_equal_a_loop(seed: int) -> None:
    random = Random(seed)
    parts = []
    for _ in range(random.randint(1, 3)):
        rows, texts, ids = random.randint(1, 12), "abcdef", [None, 0, 1, 2, 3]
        negative = [random.choices(["", None, *texts], k=random.randint(0, 3)) for _ in range(rows)]
        part = {
            "anchor": random.choices(texts, k=rows),
            "positive": random.choices(texts, k=rows),
            "negative": negative,
            "query_id": random.choices(ids, k=rows),
            "document_ids": [random.choices(ids, k=1 + sum(map(bool, row))) for row in negative],
        }
        parts.append(part)
    found = with_ids(datasets.DatasetDict({str(i): made(**part) for i, part in enumerate(parts)}))
    assert [list(part["label"]) for part in found.values()] == labels_by_a_loop(parts)


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"positive": ["x"], "document_ids": [["d", "e"]]}, "one id for each document of a row"),
        ({"positive": ["x"], "query_id": ["q"], "document_id": ["d"], "label": [0]}, "triplets or n-tuples of texts"),
        ({"positive_ids": [["d"]], "negative_ids": [["e"]]}, "triplets or n-tuples of texts"),
    ],
)
def test_mined_rows_that_cannot_be_used_are_refused(columns: dict[str, list[Any]], what: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        with_ids(made(**{"anchor" if "positive" in columns else "query_id": ["a"]}, **columns))
    assert (caught.value.who, caught.value.what) == ("with_ids", what)
    assert caught.value.fix


@pytest.mark.parametrize(
    "columns",
    [
        {"anchor": ["how many", "who"], "positive": ["doc-1", "doc-22"]},
        {"anchor": ["q1", "q2"], "positive": ["a text", "another"]},
        {"anchor": ["how many", "who"], "positive": ["a text", "another"], "passage_id": ["one", "two"]},
        {"anchor": ["how many", "who"], "positive": ["a text", "another"], "negative": [["0b3f-11"], ["77", None]]},
    ],
)
def test_texts_that_look_like_ids_warn(columns: dict[str, list[Any]]) -> None:
    forget_warnings()
    with pytest.warns(HardnegWarning) as caught:
        with_ids(made(**columns))
    assert [warning.message.kind for warning in caught] == ["with_ids.texts"]  # type: ignore[union-attr]


@pytest.mark.parametrize("words", [["B2B", "what"], ["2024 results", "42"], ["第1章", "第2章"], ["a", "b"]])
def test_short_texts_do_not_warn(words: list[str]) -> None:
    forget_warnings()  # a warning of hardneg is an error in the tests
    assert with_ids(made(anchor=words, positive=["a text", "another"]))["anchor"][:] == words


# Queries 0 and 1; documents 10, 11 (positives of query 0), 12, 13 (of query 1), 14, 15. Query 0 is in three rows.
LABELS = torch.tensor(
    [
        [0, 0, 10, 14, 11],  # 11 is a positive of this query, in row 1
        [0, 0, 11, 12, -1],
        [1, 1, 12, 10, 15],
        [1, 1, 13, -1, -1],
        [0, 0, 10, 13, 15],
        [2, 2, 15, 14, 12],
    ]
)


def columns(seed: int = 0, b: int = len(LABELS), number: int = 4) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(b, 8, generator=random, dtype=torch.float64).requires_grad_() for _ in range(number)]


def document(columns: list[Tensor], i: int, place: int) -> Tensor:
    return normalize(columns[1 + place][i], dim=0)


def negatives_of(i: int, labels: Tensor, mined_only: bool = False) -> list[tuple[int, int]]:
    """Rows and places of the documents that are negatives of anchor i, by a plain loop."""
    anchor = int(labels[i, 1])
    good = {int(row[2]) for row in labels if int(row[1]) == anchor}
    found = []
    for j, row in enumerate(labels):
        for place, number in enumerate(row[2:].tolist()):
            mine = i == j
            if number >= 0 and number not in good and number != anchor and (mine or not mined_only):
                found.append((j, place))
    return found


def loop(columns: list[Tensor], labels: Tensor, mined_only: bool = False, more: Tensor | None = None) -> Tensor:
    total = columns[0].new_zeros(())
    for i in range(len(labels)):
        query = normalize(columns[0][i], dim=0)
        others = [document(columns, j, place) for j, place in negatives_of(i, labels, mined_only)]
        others += [] if more is None else list(more)
        logits = torch.stack([query @ document(columns, i, 0), *(query @ other for other in others)]) / TEMPERATURE
        total = total - torch.log_softmax(logits, 0)[0] / len(labels)
    return total


def assert_same(ours: Tensor, theirs: Tensor, given: list[Tensor], other: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs)
    (2 * ours).backward()
    (2 * theirs).backward()
    torch.testing.assert_close([each.grad for each in given], [each.grad for each in other])


@pytest.mark.parametrize("impl", ["dense", "streamed"])
@pytest.mark.parametrize("mined_only", [False, True])
def test_unequal_negatives_several_positives_and_document_ids_equal_a_loop(impl: str, mined_only: bool) -> None:
    text = 'From("mined")' if mined_only else "Uniform()"
    ours = NegativesLoss(torch.nn.Identity(), text, TEMPERATURE, impl=impl)
    given, other = columns(), columns()
    assert_same(ours.compute_loss_from_embeddings(given, LABELS), loop(other, LABELS, mined_only), given, other)


def test_the_loop_leaves_out_what_ids_know() -> None:
    """Row 0: documents 10 and 11 are positives of query 0 wherever they stand, and its own missing ones are none."""
    assert negatives_of(0, LABELS) == [(0, 1), (1, 1), (2, 0), (2, 2), (3, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2)]


def test_positives_of_the_group_are_positives_too() -> None:
    """The mean over all positives of the group, each against the negatives, as SupCon does."""
    labels = LABELS.clone()
    labels[:, 0] = torch.tensor([7, 7, 8, 8, 7, 9])
    given, other = columns(), columns()
    ours = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE, positives="group")
    total = other[0].new_zeros(())
    for i in range(len(labels)):
        query = normalize(other[0][i], dim=0)
        places = negatives_of(i, labels)
        against = [query @ document(other, j, place) / TEMPERATURE for j, place in places]
        own = int(labels[i, 2])
        more = [j for j in range(6) if j != i and labels[j, 0] == labels[i, 0] and int(labels[j, 2]) != own]
        each = [
            -torch.log_softmax(torch.stack([query @ document(other, j, 0) / TEMPERATURE, *against]), 0)[0]
            for j in (i, *more)
        ]
        total = total + torch.stack(each).mean() / len(labels)
    assert_same(ours.compute_loss_from_embeddings(given, labels), total, given, other)


def test_documents_of_the_queue_are_candidates_unless_they_are_known() -> None:
    queue = hn.Queue(64, 8, dtype=torch.float64)
    loss = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE, queue=queue)
    first = columns(seed=1)
    loss.compute_loss_from_embeddings(first, LABELS)
    assert queue.keys().ids.tolist() == [10, 11, 12, 13, 10, 15]  # type: ignore[union-attr]
    given, other = columns(), columns()
    labels = torch.tensor([[0, 0, 10, 14, 11]])
    ours = loss.compute_loss_from_embeddings([each[:1] for each in given], labels)
    known = [normalize(first[1][j].detach(), dim=0) for j in (1, 2, 3, 5)]  # not 10; 11 is no known positive here
    theirs = loop([each[:1] for each in other], labels, more=torch.stack(known))
    assert_same(ours, theirs, given, other)
    with torch.no_grad():
        loss.compute_loss_from_embeddings(columns(), LABELS)
    assert len(queue) == 7, "evaluation pushes nothing"


def test_known_positives_of_the_whole_data_set_are_no_negatives_in_the_queue() -> None:
    data = with_ids(made(anchor=["q", "q", "r"], positive=["x", "y", "z"]))  # ids 0, 0, 1 and 2, 3, 4
    labels, given = torch.tensor(data["label"][:]), columns(b=3, number=2)
    queue = hn.Queue(8, 8, dtype=torch.float64)
    loss = NegativesLoss(torch.nn.Identity(), known_positives(data), temperature=TEMPERATURE, queue=queue)
    loss.compute_loss_from_embeddings(given, labels)
    value = loss.compute_loss_from_embeddings([each[:1] for each in given], labels[:1])
    q, d = (normalize(each, dim=1) for each in given)
    logits = torch.stack([q[0] @ d[0], q[0] @ d[2]]) / TEMPERATURE  # y is in the queue, and a positive of q
    torch.testing.assert_close(value, -torch.log_softmax(logits, 0)[0])


def test_smaller_sizes_of_a_step_do_not_meet_its_own_documents() -> None:
    """As MatryoshkaLoss calls it: the full size first, which pushes, then the first features of the same texts."""
    queue = hn.Queue(64, 8, dtype=torch.float64)
    loss = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE, queue=queue)
    with pytest.warns(HardnegWarning, match="with_ids"):
        loss.compute_loss_from_embeddings(columns(1), None)
    loss.compute_loss_from_embeddings(columns(2), None)
    short = [each[:, :4] for each in columns(2)]
    value = loss.compute_loss_from_embeddings(short, None)
    before = normalize(columns(1)[1][:, :4], dim=1)
    alone = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE, queue=hn.Queue(64, 4, dtype=torch.float64))
    alone.queue.push(hn.Keys(before.detach()))  # type: ignore[union-attr]
    torch.testing.assert_close(value, alone.compute_loss_from_embeddings(short, None))
    assert len(queue) == 12


@pytest.mark.parametrize("ids", [False, True])
def test_all_directions_in_one_denominator_equal_a_loop(ids: bool) -> None:
    """Query-document, query-query, document-query and document-document; the positive pair counts once."""
    labels = torch.tensor([[0, 0, 10, 14], [0, 0, 11, 12], [1, 1, 12, -1], [2, 2, 11, 15]])
    given, other = columns(b=4, number=3), columns(b=4, number=3)
    names = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    loss = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE, directions=names)
    q, d, n = (normalize(each, dim=1) for each in other)
    query, positive, negative = labels[:, 1].tolist(), labels[:, 2].tolist(), labels[:, 3].tolist()
    pairs = set(zip(query, positive, strict=True))
    total = q.new_zeros(())
    for i in range(4):
        others = [q[i] @ n[i]] if not ids or negative[i] >= 0 else []
        for j in range(4):
            if i == j:
                continue
            if not ids or (query[i], positive[j]) not in pairs:
                others += [q[i] @ d[j], d[i] @ d[j]]
            if not ids or (negative[j] >= 0 and (query[i], negative[j]) not in pairs):
                others += [q[i] @ n[j], d[i] @ n[j]]
            if not ids or query[i] != query[j]:
                others += [q[i] @ q[j]]
            if not ids or (query[i] != query[j] and (query[j], positive[i]) not in pairs):
                others += [d[i] @ q[j]]
        total = total - torch.log_softmax(torch.stack([q[i] @ d[i], *others]) / TEMPERATURE, 0)[0] / 4
    assert_same(loss.compute_loss_from_embeddings(given, labels if ids else None), total, given, other)


@pytest.mark.parametrize("labels", [[[0, 0, 1], [1, 1, 0], [2, 2, 9]], [[0, 0, -1], [1, 1, -1], [2, 2, 9]]])
def test_a_document_meets_no_query_of_its_own_text_in_one_denominator(labels: list[list[int]]) -> None:
    """Pairs of texts in both orders; and missing documents, which are no candidates, are not the same one."""
    given, other = columns(b=3, number=2), columns(b=3, number=2)
    loss = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE, directions=("query_to_doc", "doc_to_query"))
    q, d = (normalize(each, dim=1) for each in other)
    total = q.new_zeros(())
    for i, (_, query, text) in enumerate(labels):
        others = [row for row in range(3) if row != i]
        there = [q[i] @ d[j] for j in others if labels[j][2] not in (query, text, -1)]
        back = [d[i] @ q[j] for j in others if labels[j][1] not in (query, text)]
        total = total - torch.log_softmax(torch.stack([q[i] @ d[i], *there, *back]) / TEMPERATURE, 0)[0] / 3
    assert_same(loss.compute_loss_from_embeddings(given, torch.tensor(labels)), total, given, other)


def test_both_directions_apart_with_ids_equal_a_loop() -> None:
    labels = torch.tensor([[0, 0, 10], [0, 0, 11], [1, 1, 12], [2, 2, 11]])
    given, other = columns(b=4, number=2), columns(b=4, number=2)
    loss = NegativesLoss(
        torch.nn.Identity(), temperature=TEMPERATURE, directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )  # fmt: skip
    q, d = (normalize(each, dim=1) for each in other)
    pairs = {(0, 10), (0, 11), (1, 12), (2, 11)}
    total = q.new_zeros(())
    for i, (_, a, p) in enumerate(labels.tolist()):
        there = [q[i] @ d[j] for j, (_, _, other_p) in enumerate(labels.tolist()) if (a, other_p) not in pairs]
        back = [d[i] @ q[j] for j, (_, other_a, _) in enumerate(labels.tolist()) if (other_a, p) not in pairs]
        for others in (there, back):
            total = total - torch.log_softmax(torch.stack([q[i] @ d[i], *others]) / TEMPERATURE, 0)[0] / 8
    assert_same(loss.compute_loss_from_embeddings(given, labels), total, given, other)


@pytest.mark.parametrize("make", [hn.SogCLR, hn.EMC2])
def test_losses_over_the_whole_data_take_the_ids_of_the_anchors(make: Any) -> None:
    labels = LABELS[:, :3]
    ours = NegativesLoss(torch.nn.Identity(), objective=make(8, 0.1, views="cross"))
    plain = make(8, 0.1, views="cross")
    given, other = columns(number=2), columns(number=2)
    theirs = plain(*(normalize(each, dim=1) for each in other), ids=labels[:, 1])
    assert_same(ours.compute_loss_from_embeddings(given, labels), theirs, given, other)
    assert any(name.startswith("whole_data") for name in ours.state_dict())
    for wrong, message in ((None, "ids of the anchors"), (LABELS, "two columns")):
        with pytest.raises(ValueError, match=message):
            ours.compute_loss_from_embeddings(columns(number=2 if wrong is None else 4), wrong)
    with pytest.raises(ValueError, match="views='cross'"):
        NegativesLoss(torch.nn.Identity(), objective=make(8))


def test_errors_of_the_loss() -> None:
    for options, message in (
        ({"positives": "label"}, "'row' or 'group'"),
        ({"directions": ("doc_to_doc",)}, "including query_to_doc"),
        ({"directions": ("query_to_doc", "doc_to_doc"), "partition_mode": "per_direction"}, "without the positive"),
        ({"directions": ("query_to_doc", "doc_to_doc"), "positives": "group"}, "positives='row'"),
        ({"queue": hn.Queue(4, 8), "guide": torch.nn.Identity()}, "queue=None with a guide"),
    ):
        with pytest.raises(ValueError, match=message):
            NegativesLoss(torch.nn.Identity(), **options)  # type: ignore[arg-type]
    with raises(ArgumentError, who="NegativesLoss", what="with_ids", got="labels=(6, 4)"):
        NegativesLoss(torch.nn.Identity()).compute_loss_from_embeddings(columns(), LABELS[:, :4])


@pytest.mark.parametrize("impl", ["dense", "streamed"])
def test_unknown_ids_are_nobody_s(impl: str) -> None:
    """Anchors without an id share no positives, and a queued document without one stays a candidate.

    The positive of such an anchor is not its negative where another row has it, too.
    """
    labels = torch.tensor([[0, -1, 10], [1, -1, 11], [2, 1, 12], [3, 0, 2**31 - 1], [4, -1, 10]])
    queue = hn.Queue(1, 8)
    queue.push(hn.Keys(torch.eye(8)[:1], torch.tensor([-1])))
    given, other = columns(b=5, number=2), columns(b=5, number=2)
    ours = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE, queue=queue, impl=impl)
    apart = labels.clone()
    apart[labels[:, 1] < 0, 1] = torch.tensor([5, 6, 7])
    assert_same(
        ours.eval().compute_loss_from_embeddings(given, labels),
        loop(other, apart, more=torch.eye(8, dtype=torch.float64)[:1]),
        given,
        other,
    )


def test_hardness_is_compared_with_that_of_the_candidates_that_ids_leave() -> None:
    loss, given = NegativesLoss(torch.nn.Identity(), temperature=TEMPERATURE), columns(number=2)
    loss.watch = True
    loss.compute_loss_from_embeddings(given, LABELS[:, :3])
    found = loss.diagnosis()
    assert found is not None
    for i, uniform in enumerate(found.uniform_hardness.tolist()):
        query = normalize(given[0][i], dim=0)
        others = [(query @ document(given, j, 0)).item() for j, _ in negatives_of(i, LABELS[:, :3])]
        assert uniform == pytest.approx(sum(others) / len(others))


def test_a_step_issues_few_operations() -> None:
    """On a GPU, a step of a small batch costs as much as its operations; MultipleNegativesRankingLoss issues 62."""
    loss, labels = NegativesLoss(torch.nn.Identity(), "Tilt(1.0)"), torch.arange(6)[:, None] + torch.tensor([0, 0, 10])
    given = columns(number=2)
    for _ in range(2):  # calls of which the negatives are looked at, to warn
        loss.compute_loss_from_embeddings(given, labels)
    with Operations() as issued:
        loss.compute_loss_from_embeddings(given, labels).backward()
    assert issued.number <= 82
