"""Data sets of texts beside sentence-transformers and Arrow: mining, and ids for the loss."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

from cases import Work, case

PAIRS = (1_000, 2_000, 4_000, 8_000, 15_000)
ROWS = (6_250, 12_500, 25_000, 50_000, 100_000)
ST = "mine_hard_negatives of sentence-transformers with FAISS"
NEEDS = ("sentence_transformers", "datasets", "faiss")


@case("mine a data set of texts", ST, goal=0.86, sizes=PAIRS, at=PAIRS[-1:], unit="pairs", needs=NEEDS, growth=2.0)
def mine_texts(n: int) -> tuple[Work, Work]:
    """Rows with lists of 5 negatives by a static model; the goal of 9 s beside 10.5 s was set for 29,665 texts."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from mine_dataset import OURS, make_model, make_pairs, mined
    from sentence_transformers.util import mine_hard_negatives

    import hardneg as hn

    model, pairs = make_model(), make_pairs(n)
    mined(OURS, make_pairs(200), model)
    options: dict[str, Any] = {"relative_margin": 0.05, "range_max": 100, "num_negatives": 5, "output_scores": True}
    options |= {"output_format": "labeled-list", "verbose": False}

    def ours() -> float:
        with contextlib.redirect_stderr(io.StringIO()):
            return float(len(hn.mine(pairs, model=model, **options)))

    def theirs() -> float:
        with contextlib.redirect_stderr(io.StringIO()):
            return float(len(mine_hard_negatives(pairs, model, use_faiss=True, **options)))

    return ours, theirs


@case(
    "with_ids",
    "dictionary encoding in Arrow",
    seconds=0.5,
    sizes=ROWS,
    at=ROWS[-1:],
    unit="triplets",
    needs=("datasets",),
    growth=1.0,
)
def ids(n: int) -> tuple[Work, Work]:
    """The ids are read as lists; the peer numbers the texts of each column for itself."""
    import numpy as np
    from datasets import Dataset

    from hardneg.integrations.sentence_transformers import with_ids

    random = np.random.default_rng(0)
    documents = [f"document {i} about something " + "words " * 20 for i in range(n)]
    columns = {"anchor": [f"what is {i // 2} in the world" for i in range(n)], "positive": documents}
    dataset = Dataset.from_dict({**columns, "negative": [documents[i] for i in random.integers(0, n, n)]})

    def ours() -> None:
        with_ids(dataset)["label"][:]

    def theirs() -> None:
        for column in dataset.with_format("arrow")[:].columns:
            column.dictionary_encode()

    return ours, theirs
