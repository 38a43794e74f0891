"""A small mining job with an encoder of its own, and what it gives."""

from __future__ import annotations

import csv
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardneg.core.types import Keys
from hardneg.mining import mine
from hardneg.mining.options import MineOptions

WORDS = tuple("cat dog fish bird tree rock river cloud sun moon star wind rain snow fire sand salt iron".split())  # noqa: SIM905


def encode(texts: list[str]) -> np.ndarray:
    """Pairs of letters, counted, and a little of each text's own, so that no two scores are equal."""
    own = [np.random.default_rng(zlib.crc32(text.encode("utf-8", "surrogatepass"))) for text in texts]
    out = np.stack([0.1 * each.standard_normal(64, dtype=np.float32) for each in own])
    for row, text in enumerate(texts):
        for first, second in zip(text, text[1:] + " ", strict=True):
            out[row, (ord(first) * 31 + ord(second)) % 64] += 1
    return out


def overlap(pairs: list[tuple[str, str]]) -> list[float]:
    return [len(set(a.split()) & set(b.split())) + len(b) / 1000 for a, b in pairs]


def make_rows(n: int = 60, q: int = 20) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 6)) + f" {i}" for i in range(n)]
    corpus = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    queries = [
        {"id": f"q{i}", "query": " ".join(texts[i].split()[:4]), "positive": [f"d{i}", f"d{i + 20}"][: 1 + i % 2]}
        for i in range(q)
    ]
    return queries, corpus


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_job(folder: Path) -> MineOptions:
    queries, corpus = make_rows()
    return MineOptions(
        queries=write_lines(folder / "queries.jsonl", queries),
        corpus=write_lines(folder / "corpus.jsonl", corpus),
        out=str(folder / "mined.jsonl"),
        encoder="support.mining_jobs:encode",
        cache_key="1",
        negatives="BelowPositive(relative=0.02)",
        k=3,
        format="ids",
    )


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def expected(k: int = 3, text: str = "BelowPositive(relative=0.02)", **options: Any) -> list[list[str]]:
    queries, corpus = make_rows()
    unit = torch.nn.functional.normalize
    q = unit(torch.from_numpy(encode([row["query"] for row in queries])), dim=-1)
    c = unit(torch.from_numpy(encode([row["text"] for row in corpus])), dim=-1)
    positives = [[int(one[1:]) for one in row["positive"]] for row in queries]
    mined = mine(Keys(q), Keys(c), positives, text, k, **options)
    return [[f"d{row}" for row in rows.tolist() if row >= 0] for rows in mined.rows]


def as_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(list(rows[0]))
        writer.writerows(list(row.values()) for row in rows)
    return str(path)


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)
