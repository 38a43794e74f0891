"""Mining on real judgements, scifact and nfcorpus, against a brute-force search of whole rows."""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.mining import mine

DATA = Path(os.environ.get("HARDNEG_DATA", "no data"))
K, QUERIES = 8, 60
EXPRESSIONS = [
    "Uniform()",
    "Rank(10, 100)",
    "BelowPositive(relative=0.05)",
    "BelowPositive(absolute=0.1) * Rank(5)",
    "BelowPositive(relative=0.05, absolute=0.02) * Rank(0, 50)",
    "Rank(0, 50) * BelowPositive(relative=0.1)",
    "Threshold(0.3)",
    "Threshold(0.2) * BelowPositive(relative=0.05) * Rank(3)",
    "Ring(0.01, 0.1)",
    "BelowPositive(relative=0.05) * Ring(0.0, 0.05)",
]


def encode(texts: list[str]) -> Tensor:
    """Bags of hashed words with a random vector for each: a fixed, cheap encoder."""
    table = normalize(torch.randn(4096, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1)
    rows = [[zlib.crc32(word.encode()) % 4096 for word in text.lower().split()] for text in texts]
    return normalize(torch.stack([table[torch.tensor(row)].sum(0) for row in rows]), dim=-1)


@cache
def scifact() -> tuple[Tensor, Tensor, list[list[int]]]:
    folder = DATA / "scifact"
    tables = []
    for name in ("corpus", "queries"):
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            tables.append([json.loads(line) for line in file])
    row_of = {row["_id"]: number for number, row in enumerate(tables[0])}
    text_of = {row["_id"]: row["text"] for row in tables[1]}
    relevant: dict[str, list[int]] = {}
    with (folder / "qrels" / "train.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            relevant.setdefault(row["query-id"], []).append(row_of[row["corpus-id"]])
    chosen = sorted(relevant, key=lambda query: -len(relevant[query]))[:QUERIES]
    documents = encode([f"{row['title']} {row['text']}" for row in tables[0]])
    return encode([text_of[query] for query in chosen]), documents, [relevant[query] for query in chosen]


@cache
def nfcorpus() -> tuple[Tensor, Tensor, list[list[int]]]:
    def rows(name: str) -> list[list[str]]:
        with gzip.open(DATA / "nfcorpus" / name, "rt", encoding="utf-8") as file:
            return [line.rstrip("\n").split("\t") for line in file]

    documents = rows("docs.tsv.gz")
    row_of = {row[0]: number for number, row in enumerate(documents)}
    text_of = {row[1]: row[2] for row in rows("queries.tsv.gz") if row[0] == "test"}
    relevant: dict[str, list[int]] = {}
    for split, query, document, _ in rows("qrels.tsv.gz"):
        if split == "test" and document in row_of and query in text_of:
            relevant.setdefault(query, []).append(row_of[document])
    chosen = sorted(relevant)[:QUERIES]
    return (
        encode([text_of[query] for query in chosen]),
        encode([row[1] for row in documents]),
        [relevant[query] for query in chosen],
    )


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")
@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("name", ["scifact", "nfcorpus"])
def test_mined_negatives_equal_whole_rows(name: str, text: str) -> None:
    if not (DATA / name).is_dir():
        pytest.skip(f"needs {name} in HARDNEG_DATA")
    queries, documents, relevant = {"scifact": scifact, "nfcorpus": nfcorpus}[name]()
    mined = mine(hn.Keys(queries), hn.Keys(documents), relevant, text, K)
    for i, own in enumerate(relevant):
        is_own = torch.zeros(1, len(documents), dtype=torch.bool)
        is_own[0, own] = True
        scores = hn.from_matrix(queries[i : i + 1] @ documents.T, is_own)
        log_w = hn.parse(text).log_weights(scores)[0]
        best = scores.candidates[0].masked_fill(log_w == hn.NEVER, hn.NEVER).topk(K).values
        torch.testing.assert_close(mined.scores[i], best, rtol=0, atol=1e-12)
        chosen = mined.rows[i][mined.rows[i] >= 0]
        assert not is_own[0, chosen].any()
        torch.testing.assert_close(documents[chosen] @ queries[i], best[: len(chosen)], rtol=0, atol=1e-12)
        assert len(chosen.unique()) == len(chosen)
