"""What the studies of texts share: sentences of Wikipedia, and a file of results."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hardneg.io.provenance import environment

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("HARDNEG_DATA", "data"))
RESULTS = ROOT / "benchmarks/results"


def articles(number: int) -> Iterator[list[str]]:
    """The first ``number`` sentences of $HARDNEG_DATA/sentences, those of one article together."""
    article, held = "", []
    with lzma.open(DATA / "sentences" / "wiki_en_sentences.tsv.xz", "rt", encoding="utf-8") as file:
        for line in islice(file, number):
            where, sentence = line.rstrip("\n").split("\t")
            if where != article and held:
                yield held
                held = []
            article = where
            held.append(sentence)
    yield held


def write_lines(path: Path, documents: Iterator[list[str]]) -> Path:
    """One sentence per line, an empty line between documents; kept where it is there already."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join("\n".join(one) for one in documents) + "\n", encoding="utf-8")
    return path


def of_seeds(values: list[float], scale: float = 100.0) -> dict[str, Any]:
    """Mean and deviation over the seeds, and each of them."""
    deviation = round(scale * stdev(values), 2) if len(values) > 1 else None
    return {"mean": round(scale * mean(values), 2), "deviation": deviation, "seeds": [round(v, 5) for v in values]}


def without_paths(options: dict[str, Any]) -> dict[str, Any]:
    """The options that mean the same on any machine."""
    return {name: value for name, value in options.items() if "/" not in str(value)}


def kept_of(path: Path, key: str) -> dict[str, Any]:
    """What an earlier call wrote under this key."""
    return dict(json.loads(path.read_text(encoding="utf-8"))[key]) if path.exists() else {}


def write_result(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **found}, indent=2) + "\n", encoding="utf-8")
