"""``hn.mine`` for every kind of input: keys, arrays, lists and text ids, or a data set with a model.

``mine`` converts its input and passes it on: vectors to ``mine_vectors``, which runs a ``Miner`` over the whole corpus,
and data sets to ``hardneg.mining.dataset.mine_dataset``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, check_kind
from hardneg.core.types import Keys
from hardneg.mining.alignment import (
    warn_of_alignment,
    warn_of_easy_negatives,
    warn_of_missing_positives,
    warn_of_short,
)
from hardneg.mining.corpus_scores import Rescore
from hardneg.mining.miner import Mined, Miner
from hardneg.mining.options import TEMPERATURE, DrawKind, MineOptions, Similarity
from hardneg.mining.pairs import Positives, as_one, numbered_ids
from hardneg.mining.search import Search, SearchKind
from hardneg.mining.select import Rule
from hardneg.negatives import Negatives, parse


@overload
def mine(
    queries: Keys | Tensor,
    corpus: Keys | Tensor,
    positives: Any,
    negatives: Negatives | str = MineOptions.negatives,
    k: int = MineOptions.k,
    draw: DrawKind = "top",
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
        **options: The same arguments by name, and those of ``mine_vectors`` or ``mine_dataset``.

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
    from hardneg.mining.dataset import is_dataset, mine_dataset  # mines by mine_vectors

    if is_dataset(queries):
        return mine_dataset(queries, *given, **options)
    if queries is None:
        fix = "check what was loaded: pass the vectors of the queries, or the data set with model=..."
        raise ArgumentError("mine", "vectors of queries or a data set", "None", fix)
    if isinstance(queries, str | Path):
        fix = "read it first, such as by datasets.load_dataset, or use `hardneg mine` for files"
        raise ArgumentError("mine", "vectors or a data set", repr(str(queries)), fix)
    return _mine_arrays(queries, given, options)


def _mine_arrays(queries: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Mined:
    """Mine for vectors of any kind that ``Keys`` accepts, with the arguments of ``mine``."""
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
        mined = mine_vectors(*as_one(_keys(queries), corpus), positives, **options)
    warn_of_short(mined.explanation, mined.rows.shape[1])
    if corpus.names is None:
        return mined
    rows = mined.rows.numpy()
    return replace(mined, ids=np.where(rows >= 0, corpus.names[np.maximum(rows, 0)], None))


def mine_vectors(
    queries: Keys,
    corpus: Keys,
    positives: Positives,
    negatives: Negatives | str = MineOptions.negatives,
    k: int = MineOptions.k,
    draw: DrawKind = "top",
    seed: int = 0,
    *,
    similarity: Similarity | None = None,
    temperature: float = TEMPERATURE,
    near_positive: float | None = None,
    near_negative: float | None = None,
    search: Search | SearchKind = "exact",
    rescore: Rescore | None = None,
    guide: tuple[Tensor, Tensor] | Rescore | None = None,
    progress: Callable[[int], None] | None = None,
) -> Mined:
    """Mine k negatives from the corpus for each query, by any distribution, as in training.

    Args:
        queries: Vectors of the queries [q, d]; a query with an id is never matched with the corpus
            row of the same id.
        corpus: Vectors of the documents [n, d], with distinct ids if they have any.
        positives: Corpus ids (row numbers where the corpus has no ids): [q], [q, p] padded with -1,
            or one list per query. Positives are never negatives. ``BelowPositive`` compares with
            the lowest-scored one.
        negatives: Distribution, or its expression such as ``"BelowPositive(0.05) * Tilt(10)"``.
        k: Number of negatives per query.
        draw: ``"top"``, the k most similar of the support; ``"gumbel"``, k draws without
            replacement from the weights; ``"categorical"``, with replacement. A draw depends only
            on the seed and on the positions of query and candidate.
        seed: Seed of the draws.
        similarity: ``"cosine"``, or ``"dot"`` for the dot product of the vectors as they are; None
            is that of ``search``, which is the cosine by default.
        temperature: Divisor of the similarities for tilts; 1 means that ``Tilt(beta)`` is exp(beta
            * similarity).
        near_positive: Cosine from which a candidate counts as a near-duplicate of a positive and is
            skipped.
        near_negative: Cosine from which a candidate counts as a near-duplicate of a negative chosen
            before and is skipped.
        search: How candidates are found; see ``Search``.
        rescore: ``rescore(query_rows [m], corpus_rows [m]) -> scores [m]``, a cross-encoder for
            example. It scores the nearest ``search.candidates`` of each query and the positives,
            and its scores replace the similarities.
        guide: Another model's vectors of the queries [q, e] and of the corpus [n, e], or a function
            like ``rescore``, for ``BelowPositive(..., by="guide")``. A function scores only the
            nearest ``search.candidates``.
        progress: Called with the number of queries decided since the last call.

    Returns:
        The negatives with scores, retrievers and an explanation.

    Raises:
        ArgumentError: If shapes, ids, the rule or the search do not fit together.
        NotFinite: If vectors contain NaN or infinite values.

    Example:
        >>> keys = Keys(torch.eye(3), ids=torch.tensor([7, 8, 9]))
        >>> found = mine_vectors(keys, keys, torch.tensor([8, 9, 7]), "Uniform()", k=2)
        >>> found.ids.tolist()  # neither the query itself nor its positive
        [[9, -1], [7, -1], [8, -1]]
    """
    rule = Rule(parse(negatives) if isinstance(negatives, str) else negatives, k, draw, seed, near_negative)
    search = Search(search) if isinstance(search, str) else search
    check_kind("mine", "search", search, Search, "a Search, or the kind of one")
    search = search if similarity is None else replace(search, similarity=similarity)
    for name, given in (("rescore", rescore), ("guide", guide)):
        if not (given is None or callable(given) or (name == "guide" and isinstance(given, tuple))):
            what = "a function of queries and rows" + ", or (queries, documents) of a second model" * (name == "guide")
            raise ArgumentError("mine", what, f"{name} of type {type(given).__name__}")
    miner = Miner(queries, corpus, positives, rule, temperature, near_positive, search, rescore, guide)
    alignment = miner.alignment()
    warn_of_alignment(alignment)
    warn_of_missing_positives(miner.scorer.positives, rule.negatives, stacklevel=5)
    mined = miner.joined(miner.mined(progress))
    if rescore is None:
        several = bool((miner.scorer.positives.count() > 1).any())
        warn_of_easy_negatives(alignment, rule.negatives, draw, mined.scores[mined.rows >= 0], several)
    return mined


def _keys(given: Any) -> Keys:
    return given if isinstance(given, Keys) else Keys(given)
