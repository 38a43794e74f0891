"""hn.mine for a ``datasets.Dataset``: (anchor, positive) texts and a model in, a Dataset with negatives out.

The columns, their names and the order of the rows are those of sentence-transformers' ``mine_hard_negatives``. Its
options have the same names here and are translated to an expression (st_names.py), which is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from hardneg.core.errors import ArgumentError, argument_error, optional
from hardneg.core.types import Keys
from hardneg.core.vectors import unit
from hardneg.mining.cache_key import key_of_model
from hardneg.mining.encode import Encoder, embed
from hardneg.mining.engine import mine
from hardneg.mining.options import TEMPERATURE
from hardneg.mining.output import Layout, Result, columns_of
from hardneg.mining.pair_scores import PairScorer, pair_scorer
from hardneg.mining.problem import Problem, Side, build_problem
from hardneg.mining.ranks import Ranks
from hardneg.mining.search import Search
from hardneg.mining.st_names import Translated, translate
from hardneg.negatives import Negatives, parse


def is_dataset(value: Any) -> bool:
    return hasattr(value, "column_names") and hasattr(value, "__len__")


def mine_dataset(
    dataset: Any,
    model: Any = None,
    negatives: Negatives | str | None = None,
    k: int | None = None,
    draw: str | None = None,
    seed: int = 0,
    *,
    corpus: Sequence[str] | None = None,
    anchor_column_name: str | None = None,
    positive_column_name: str | None = None,
    temperature: float = TEMPERATURE,
    near_positive: float | None = None,
    near_negative: float | None = None,
    search: Search | None = None,
    guide: Any = None,
    cross_encoder: Any = None,
    output_format: str = "triplet",
    output_scores: bool = False,
    query_prompt: str | None = None,
    query_prompt_name: str | None = None,
    corpus_prompt: str | None = None,
    corpus_prompt_name: str | None = None,
    batch_size: int = 32,
    cache_folder: str | None = None,
    verbose: bool = True,
    **named: Any,
) -> Any:
    """A Dataset of the anchors and positives with mined negatives, in one of sentence-transformers' formats.

    model: a SentenceTransformer, its path, or a function from texts to vectors. guide: another one, for
        ``by="guide"``. cross_encoder: a CrossEncoder, its path, or a function of (query, document) pairs; it rescores
        the nearest candidates, and its scores replace the similarities.
    corpus: further documents; the positives always belong to it. Equal texts are one query or one document.
    negatives, k, draw: as in ``mine``; or instead of them range_min, range_max, max_score, min_score, absolute_margin,
        relative_margin, num_negatives and sampling_strategy of sentence-transformers. Both together raise.
    cache_folder: where embeddings are kept, by content.

    Without options these are the 3 nearest that are no positive, as there. Two things differ: a document that is the
    text of the query itself is never its negative, and a query is short only if the corpus is.
    """
    if model is None:
        raise ArgumentError("mine", "a model for the texts of a data set", "model=None", "pass model=...")
    names = _columns(dataset, anchor_column_name, positive_column_name)
    problem, texts = _problem(dataset, names, corpus)
    rule = translate(named, negatives, k, draw, max(map(len, problem.positives)))
    expression = parse(rule.negatives) if isinstance(rule.negatives, str) else rule.negatives
    console = Console(quiet=not verbose)
    console.print(Text(f"mining {rule.k} negatives of {len(texts[0]):,} queries: {expression!r}, draw {rule.draw!r}"))
    prompts = ((query_prompt, query_prompt_name), (corpus_prompt, corpus_prompt_name))
    cache = None if cache_folder is None else Path(cache_folder)
    vectors = [_embedded(each, model, side, prompts[side], batch_size, cache) for side, each in enumerate(texts)]
    guided = None
    if guide is not None:
        first, second = (
            _embedded(each, guide, side, (None, None), batch_size, cache) for side, each in enumerate(texts)
        )
        guided = first, second
    mined = mine(
        Keys(vectors[0], torch.tensor(problem.own)),
        Keys(vectors[1], torch.arange(len(texts[1])), source="embedding"),
        problem.positives,
        expression,
        rule.k,
        rule.draw,
        seed,
        temperature=temperature,
        near_positive=near_positive,
        near_negative=near_negative,
        search=_search(search, rule, cross_encoder),
        rescore=None if cross_encoder is None else _rescorer(cross_encoder, texts, batch_size),
        guide=guided,
    )
    if mined.explanation.short:
        short = f"{mined.explanation.short:,} of {len(texts[0]):,} queries have fewer than {rule.k} negatives"
        console.print(Text(f"{short}: {mined.explanation.reason()}"))
    layout = Layout(output_format, *names, scores=output_scores)
    scored = _positive_scores(problem, vectors, cross_encoder, texts, batch_size)
    arrays = (mined.rows.numpy(), mined.scores.numpy(), scored, mined.found_by.numpy())
    table = columns_of(Result(problem, *arrays, mined.retrievers), layout)
    return optional("datasets", "mine(dataset, ...)", extra="text").Dataset.from_dict(table)


def _columns(dataset: Any, anchor: str | None, positive: str | None) -> tuple[str, str]:
    """The columns of anchors and positives: as named, or the first two."""
    if isinstance(dataset, dict):
        raise ArgumentError("mine", "one data set", f"a dict of {list(dataset)}", "pass one of them")
    known = list(dataset.column_names)
    if not len(dataset) or len(known) < 2:
        raise ArgumentError("mine", "rows of an anchor and a positive", f"{len(dataset)} rows of columns {known}")
    for name, value in (("anchor_column_name", anchor), ("positive_column_name", positive)):
        if value is not None and value not in known:
            raise argument_error("mine", f"a column among {known}", name, value)
    return anchor or known[0], positive or known[1]


def _problem(
    dataset: Any, names: tuple[str, str], corpus: Sequence[str] | None
) -> tuple[Problem, tuple[list[str], list[str]]]:
    """Queries, documents and positives, and the texts of both; documents in the order of sentence-transformers."""
    anchors, positives = (list(dataset[name]) for name in names)
    for name, column in zip(names, (anchors, positives), strict=True):
        wrong = next((one for one in column if not isinstance(one, str) or not one.strip()), None)
        if wrong is not None:
            raise argument_error("mine", "texts in every row", name, wrong)
    documents = list(dict.fromkeys([*(corpus or ()), *positives]))
    queries = Side(list(range(len(anchors))), anchors, named=False)
    problem = build_problem(
        queries, Side(list(range(len(documents))), documents, named=False), [[one] for one in positives]
    )
    assert problem.queries.texts is not None
    assert problem.corpus.texts is not None
    return problem, (problem.queries.texts, problem.corpus.texts)


def _search(search: Search | None, rule: Translated, cross_encoder: Any) -> Search:
    if search is not None:
        return search
    if cross_encoder is not None:
        return Search(candidates=rule.candidates)
    return Search("flat" if rule.use_faiss else "exact")


def _embedded(
    texts: list[str], model: Any, side: int, prompts: tuple[str | None, str | None], size: int, cache: Path | None
) -> Tensor:
    """Vectors of unit length, of the queries (side 0) or of the documents (side 1), each with its prompt."""
    if isinstance(model, str):
        model = optional("sentence_transformers", "mine(model=...)", extra="text").SentenceTransformer(model)
    encode = _encode(model, side, prompts, size)
    if cache is None:
        return unit(torch.as_tensor(np.asarray(encode(texts))).float())
    if not hasattr(model, "state_dict"):
        raise ArgumentError("mine", "a SentenceTransformer for cache_folder", "a function", "keep its vectors yourself")
    key = f"{key_of_model('', model)} {side} {prompts!r}"
    return unit(embed(texts, Encoder(key, encode), cache, Ranks()))


def _encode(model: Any, side: int, prompts: tuple[str | None, str | None], size: int) -> Callable[[list[str]], Any]:
    plain = getattr(model, "encode", None)
    if plain is None:
        if any(prompts):
            raise ArgumentError("mine", "a SentenceTransformer for prompts", "a function", "add them in the function")
        return lambda texts: _as_array(model(texts))
    encode = getattr(model, ("encode_query", "encode_document")[side], plain)
    return lambda texts: encode(
        texts,
        batch_size=size,
        normalize_embeddings=True,
        convert_to_numpy=True,
        show_progress_bar=False,
        prompt=prompts[0],
        prompt_name=prompts[1],
    )


def _as_array(vectors: Any) -> Any:
    return vectors.detach().float().cpu().numpy() if isinstance(vectors, Tensor) else np.asarray(vectors, np.float32)


def _rescorer(cross_encoder: Any, texts: tuple[list[str], list[str]], size: int) -> PairScorer:
    return PairScorer(pair_scorer(cross_encoder, size), *texts)


def _positive_scores(
    problem: Problem, vectors: list[Tensor], cross_encoder: Any, texts: tuple[list[str], list[str]], size: int
) -> Any:
    """The scores of the positives laid end to end."""
    count = torch.tensor([len(rows) for rows in problem.positives])
    query = torch.repeat_interleave(torch.arange(len(count)), count)
    rows = torch.tensor([row for own in problem.positives for row in own])
    if cross_encoder is not None:
        return _rescorer(cross_encoder, texts, size)(query, rows).numpy()
    return (vectors[0][query] * vectors[1][rows]).sum(-1).numpy()
