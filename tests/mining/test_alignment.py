"""Ids that do not belong together are warned of, and ordinary sets are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from hardneg.auditing import audit
from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.core.errors import ArgumentError, DataChanged, HardnegWarning, forget_warnings
from hardneg.mining import mine
from hardneg.mining.alignment import Alignment, alignment_of
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.mining.pairs import RowsOf, read_positives
from support.errors import raises


def make_pairs(queries: int = 120, documents: int = 400, noise: float = 1.0) -> tuple[Any, Any]:
    """Queries near the first documents; documents lie in topics, as those of a model do."""
    random = torch.Generator().manual_seed(0)
    topics = torch.randn(20, 16, generator=random)
    corpus = topics[torch.arange(documents) % 20] + 0.7 * torch.randn(documents, 16, generator=random)
    near = corpus[:queries] + noise * 0.3 * torch.randn(queries, 16, generator=random)
    return normalize(near, dim=-1), normalize(corpus, dim=-1)


def aligned(queries: Any, corpus: Any, positives: Any, cosine: bool = False) -> Alignment:
    return alignment_of(
        queries, corpus, read_positives(positives, len(queries), RowsOf(None, len(corpus))), cosine=cosine
    )


def test_ids_counted_from_1_are_found_and_the_right_ones_are_not_blamed() -> None:
    queries, corpus = make_pairs()
    rows = torch.arange(120)
    assert not aligned(queries, corpus, rows).lost
    for shift in (-1, 1):
        found = aligned(queries, corpus, (rows + shift) % 400)
        assert found.lost
        assert found.shift == -shift


def test_ids_counted_from_1_are_found_where_neighbours_share_a_topic() -> None:
    """As in nfcorpus: the row beside a positive is itself closer than a random one."""
    random = torch.Generator().manual_seed(1)
    topics = torch.randn(40, 16, generator=random).repeat_interleave(10, 0)
    corpus = topics + 0.5 * torch.randn(400, 16, generator=random)
    queries = corpus + 0.3 * torch.randn(400, 16, generator=random)
    rows = torch.arange(400)
    right, wrong = (aligned(queries, corpus, ids, cosine=True) for ids in (rows, (rows + 1) % 400))
    assert wrong.closer > 0.6  # closeness alone would not show it
    assert wrong.lost
    assert not right.lost


def test_another_order_of_the_vectors_is_found() -> None:
    queries, corpus = make_pairs()
    assert aligned(
        queries, corpus[torch.randperm(400, generator=torch.Generator().manual_seed(2))], torch.arange(120)
    ).lost


def test_vectors_of_random_numbers_and_few_queries_are_not_blamed() -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        queries, corpus = torch.randn(200, 24, generator=random), torch.randn(500, 24, generator=random)
        assert not aligned(queries, corpus, torch.randint(0, 500, (200, 3), generator=random)).lost
    queries, corpus = make_pairs(queries=20)
    assert not aligned(queries, corpus, torch.arange(1, 21)).lost


def test_files_of_pairs_in_which_the_query_stands_before_its_positive_are_not_blamed() -> None:
    random = torch.Generator().manual_seed(0)
    base = normalize(torch.randn(60, 16, generator=random).repeat_interleave(2, 0), dim=-1)
    corpus = normalize(base + 0.1 * torch.randn(120, 16, generator=random), dim=-1)
    assert not aligned(corpus[0::2], corpus, torch.arange(1, 120, 2)).lost


def test_mine_and_audit_warn_of_shifted_ids() -> None:
    import hardneg as hn

    queries, corpus = make_pairs()
    with pytest.warns(HardnegWarning, match="The rows before the positives are closer .* Are the ids aligned"):
        hn.mine(hn.Keys(queries), hn.Keys(corpus), torch.arange(1, 121), "Uniform()", 3)
    with pytest.warns(HardnegWarning, match="The positives are no closer"):  # other ids, which are wrong again
        hn.mine(hn.Keys(queries), hn.Keys(corpus), torch.arange(120).flip(0), "Uniform()", 3)
    mine(hn.Keys(queries), hn.Keys(corpus), torch.arange(120), "BelowPositive(relative=0.05)", 3)


def test_an_audit_notes_what_is_misaligned() -> None:
    queries, corpus = make_pairs()
    with pytest.warns(HardnegWarning, match="Are the ids aligned"):
        found = audit(queries, corpus=corpus, positives=torch.arange(1, 121), frontier=False, negatives="Uniform()")
    assert any("1 too large" in note for note in found.notes)
    forget_warnings()
    with pytest.warns(HardnegWarning, match="Are the ids aligned"):
        audit(queries, positives=corpus[1:121], frontier=False, negatives="Uniform()")  # a second view
    lists = torch.randint(120, 400, (120, 5), generator=torch.Generator().manual_seed(0))
    with pytest.warns(HardnegWarning, match="mined negatives are no closer than random candidates"):
        audit(queries, corpus=corpus, positives=torch.arange(120), mined=lists, frontier=False)
    fine = audit(queries, corpus=corpus, positives=torch.arange(120), frontier=False, negatives="Uniform()")
    assert not any("aligned" in note for note in fine.notes)


def test_a_margin_below_the_lowest_of_several_positives_is_warned_of() -> None:
    import hardneg as hn

    queries, corpus = make_pairs()
    order = (queries @ corpus.T).argsort(1)
    positives = torch.cat([order[:, -3:], order[:, 20:21]], 1)  # three near, and one of the farthest
    with pytest.warns(
        HardnegWarning, match=r"easier than random .* BelowPositive\(relative=0.05\) compares with the low"
    ):
        hn.mine(hn.Keys(queries), hn.Keys(corpus), positives, "BelowPositive(relative=0.05)", 3)
    hn.mine(hn.Keys(queries), hn.Keys(corpus), positives, "Ring(0.01, 0.1)", 3)


def test_a_margin_wider_than_the_similarities_of_the_model_is_warned_of(tmp_path: Path) -> None:
    """As of models whose vectors share a direction: 5 % below the positives (.957) is below random documents (.925)."""
    import hardneg as hn

    queries, corpus = make_pairs()
    ours, others = (normalize(each + 5.0 * torch.eye(16)[0], dim=-1) for each in (queries, corpus))
    ours = normalize(ours + 0.3 * torch.randn(120, 16, generator=torch.Generator().manual_seed(1)) / 4, dim=-1)
    keys = hn.Keys(ours), hn.Keys(others), torch.arange(120)
    with pytest.warns(HardnegWarning, match=r"easier than random documents .mean similarity 0\.\d+ against 0\.\d+"):
        hn.mine(*keys, "BelowPositive(relative=0.05)", 3)
    hn.mine(*keys, "BelowPositive(absolute=0.0)", 3)
    np.save(tmp_path / "q.npy", ours.numpy())
    np.save(tmp_path / "d.npy", others.numpy())
    write_judgements(tmp_path, [(i, i) for i in range(120)])
    paths = {name: str(tmp_path / f"{name}.npy") for name in "qd"}
    forget_warnings()
    with pytest.warns(HardnegWarning, match="easier than random documents"):
        run(
            MineOptions(
                paths["q"], str(tmp_path / "m.jsonl"), corpus_embeddings=paths["d"],
                judgements=str(tmp_path / "j.csv"), format="ids",
            )
        )  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> MineOptions:
    queries, corpus = make_pairs()
    np.save(tmp_path / "q.npy", queries.numpy())
    np.save(tmp_path / "d.npy", corpus.numpy())
    write_judgements(tmp_path, [(i, i) for i in range(120)])
    return MineOptions(
        str(tmp_path / "q.npy"), str(tmp_path / "m.jsonl"), corpus_embeddings=str(tmp_path / "d.npy"),
        judgements=str(tmp_path / "j.csv"), format="ids", k=3,
    )  # fmt: skip


def write_judgements(folder: Path, pairs: list[tuple[int, int]]) -> None:
    (folder / "j.csv").write_text("query_id,doc_id\n" + "".join(f"{q},{d}\n" for q, d in pairs))


def test_a_job_warns_of_judgements_counted_from_1(files: MineOptions, tmp_path: Path) -> None:
    run(files)
    write_judgements(tmp_path, [(i, i + 1) for i in range(120)])
    with pytest.warns(HardnegWarning, match="these ids seem to be 1 too large"):
        run(files)


def test_judgements_of_unknown_queries_are_counted_and_named(files: MineOptions, tmp_path: Path) -> None:
    write_judgements(tmp_path, [*((i, i) for i in range(120)), (7001, 1), (7001, 2), (7002, 1)])
    with pytest.warns(HardnegWarning, match="3 of 123 judgements belong to 2 queries .*'7001', '7002'"):
        run(files)
    manifest = json.loads(Path(f"{files.out}.manifest.json").read_text())
    assert manifest["counts"]["judgements_of_unknown_queries"] == 3


def test_a_missing_last_row_is_not_to_be_dropped(files: MineOptions, tmp_path: Path) -> None:
    write_judgements(tmp_path, [(i, i + 281) for i in range(120)])  # the last one is 400, as if counted from 1
    with pytest.raises(ArgumentError) as error:
        run(files)
    assert error.value.fix is not None
    assert "subtract 1" in error.value.fix
    assert "drop" not in error.value.fix
    write_judgements(tmp_path, [(i, i + 500) for i in range(120)])
    with pytest.raises(ArgumentError) as error:
        run(files)
    assert error.value.fix is not None
    assert "numbers of the rows, 0 to 399" in error.value.fix


def test_an_audit_takes_the_judgements_of_the_manifest(files: MineOptions, tmp_path: Path) -> None:
    run(replace(files, negatives="Rank(0, 20)"))
    found = audit_files(AuditOptions(files.out))
    assert found.judges == ("judgements",)
    assert found.row("mined").judged_share == 0.0  # every judged document was a positive of the miner
    write_judgements(tmp_path, [(i, i) for i in range(119)])
    with raises(DataChanged, who="audit", what="were mined"):
        audit_files(AuditOptions(files.out))


@pytest.mark.parametrize("cosine", [True, False])
def test_the_sample_of_a_large_set_tells_as_much(cosine: bool) -> None:
    queries, corpus = make_pairs(queries=900, documents=9000)
    assert aligned(queries, corpus, torch.arange(900), cosine).queries == 256
    assert not aligned(queries, corpus, torch.arange(900), cosine).lost
    assert aligned(queries, corpus, torch.arange(1, 901), cosine).shift == -1


def test_a_search_by_words_has_no_vectors_to_compare(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="needs the extra 'lexical'")
    rows = [{"query": f"word{i} more{i % 7}", "positive": f"word{i} more{(i + 1) % 7}"} for i in range(60)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(MineOptions(str(tmp_path / "p.jsonl"), str(tmp_path / "m.jsonl"), negatives="Uniform()", search="bm25", k=1))
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 60
