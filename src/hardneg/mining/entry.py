"""``hn.mine`` for every kind of input: keys, arrays, lists and text ids, or a data set with a model.

It converts what it gets and passes it on: vectors to ``hardneg.mining.miner.mine``, data sets to
``hardneg.mining.dataset.mine_dataset``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError
from hardneg.core.types import Keys
from hardneg.mining import miner
from hardneg.mining.alignment import warn_of_short
from hardneg.mining.dataset import is_dataset, mine_dataset
from hardneg.mining.miner import Mined
from hardneg.mining.options import Draw, MineOptions, Similarity
from hardneg.mining.pairs import as_one, numbered_ids
from hardneg.negatives import Negatives


@overload
def mine(
    queries: Keys | Tensor,
    corpus: Keys | Tensor,
    positives: Any,
    negatives: Negatives | str = MineOptions.negatives,
    k: int = MineOptions.k,
    draw: Draw = "top",
    seed: int = 0,
    *,
    similarity: Similarity | None = None,
    **options: Any,
) -> Mined: ...


@overload
def mine(queries: Any, **options: Any) -> Any: ...


def mine(queries: Any, *given: Any, **options: Any) -> Any:
    """Mine hard negatives by any distribution of the grammar, for vectors or for a data set of texts.

    For vectors: ``mine(queries, corpus, positives, negatives, k, draw="top", seed=0, ...)``.
    The defaults are those of `hardneg mine`: ``"BelowPositive(relative=0.05)"``, 5 negatives, the
    cosine; ``similarity="dot"`` compares vectors as they are. In ``mine(z, z, ...)`` no row
    is its own negative.

    For texts: ``mine(dataset, model=..., negatives=..., k=...)`` with a ``datasets.Dataset`` of
    (anchor, positive) texts returns a Dataset with the columns of sentence-transformers'
    ``mine_hard_negatives``, whose options have the same names here. See
    ``hardneg.mining.dataset.mine_dataset``.

    Args:
        queries: Vectors [q, d] as Keys, tensor, array or lists; or a data set of texts.
        *given: ``corpus``, ``positives``, ``negatives``, ``k``, ``draw`` and ``seed`` by position.
            The corpus is [n, d], and positives are its ids, numbers or texts (row numbers where the
            corpus has no ids).
        **options: The same arguments by name, and those of ``hardneg.mining.miner.mine`` or
            ``mine_dataset``.

    Returns:
        ``Mined`` for vectors, with texts as ``ids`` where the ids of the corpus are texts; a
        ``datasets.Dataset`` for a data set.

    Raises:
        ArgumentError: If an argument is missing or does not fit the others; the error names the fix.

    Example:
        >>> found = mine([[1.0, 0.0]], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], [0], "Uniform()", 2)
        >>> found
        Mined(1 query, k=2: 2 negatives, 0 short, mean score 0.300)
        >>> found.ids.tolist()
        [[1, 2]]
        >>> documents = Keys([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], ids=["a", "b", "c"])
        >>> mine([[1.0, 0.0]], documents, ["a"], "Uniform()", 2).ids.tolist()
        [['b', 'c']]
    """
    if is_dataset(queries):
        return mine_dataset(queries, *given, **options)
    if queries is None:
        fix = "check what was loaded: pass the vectors of the queries, or the data set with model=..."
        raise ArgumentError("mine", "vectors of queries or a data set", "None", fix)
    if isinstance(queries, str | Path):
        fix = "read it first, such as by datasets.load_dataset, or use `hardneg mine` for files"
        raise ArgumentError("mine", "vectors or a data set", repr(str(queries)), fix)
    names = ("corpus", "positives", "negatives", "k", "draw", "seed")
    if len(given) > len(names):
        raise ArgumentError("mine", f"at most {', '.join(names)} by position", f"{len(given) + 1} arguments")
    options = {**dict(zip(names, given, strict=False)), **options}
    missing = [name for name in names[:2] if options.get(name) is None]
    missing += [name for name in names[2:4] if options.get(name, "") is None]
    if missing:
        raise ArgumentError("mine", "queries, corpus and positives, or a data set", f"no {missing[0]}")
    corpus = _keys(options.pop("corpus"))
    positives = numbered_ids(options.pop("positives"), corpus.names)
    if isinstance(options.get("guide"), (tuple, list)):
        options["guide"] = tuple(_keys(each).vectors for each in options["guide"])
    with torch.no_grad():
        mined = miner.mine(*as_one(_keys(queries), corpus), positives, **options)
    warn_of_short(mined.explanation, mined.rows.shape[1])
    if corpus.names is None:
        return mined
    rows = mined.rows.numpy()
    return replace(mined, ids=np.where(rows >= 0, corpus.names[np.maximum(rows, 0)], None))


def _keys(given: Any) -> Keys:
    return given if isinstance(given, Keys) else Keys(given)
