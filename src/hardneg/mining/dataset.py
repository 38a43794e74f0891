"""``hn.mine`` for a ``datasets.Dataset``: mine (anchor, positive) texts with a model.

The columns, their names and the order of the rows are those of sentence-transformers'
``mine_hard_negatives``. ``mine_dataset`` encodes the texts, mines by ``mine_vectors`` and writes columns
by ``output.columns_of``. Options of sentence-transformers are translated to an expression, which is
printed:

    relative_margin, absolute_margin    BelowPositive(relative=..., absolute=...)
    max_score, min_score                AtMost(...), Threshold(...)
    range_min, range_max                Rank(range_min, range_max), after the others
    num_negatives, sampling_strategy    k; draw "top", or "gumbel" for "random", with a seed

sentence-transformers cuts a list of range_max + the number of positives before the filters, so a
query may have too few negatives although the corpus has more. Here the filters come first: the
negatives are the same if that list was long enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from hardneg.core.errors import (
    ArgumentError,
    UnknownName,
    argument_error,
    check_among,
    check_callable,
    check_count,
    optional,
)
from hardneg.core.tensors import unit
from hardneg.core.text import counted
from hardneg.core.types import Keys
from hardneg.io.functions import loading_model
from hardneg.io.pair_labels import is_label, label_column, split_by_label
from hardneg.io.tables import column_of
from hardneg.io.terminal import Terminal, progress_bars
from hardneg.mining.cache_key import key_of_function, key_of_model
from hardneg.mining.encode import EncodeTexts, KeyedEncoder, embed, vectors_of, warn_not_reused
from hardneg.mining.engines import Ranks
from hardneg.mining.entry import mine_vectors
from hardneg.mining.explain import no_negatives
from hardneg.mining.options import TEMPERATURE, DrawKind, MineOptions
from hardneg.mining.output import Layout, Result, columns_of, has_rows, with_judged_negatives
from hardneg.mining.pair_scores import PairScorer, pair_scorer
from hardneg.mining.problem import Problem, Side, build_problem, texts_of
from hardneg.mining.search import Search
from hardneg.mining.table_columns import JudgedDocuments, check_no_label_ignored
from hardneg.negatives import Negatives, parse


def is_dataset(value: Any) -> bool:
    """Return True for a ``datasets.Dataset`` and for a DataFrame with other columns than numbers.

    A DataFrame of numbers only is a table of vectors.
    """
    return hasattr(value, "column_names") or (is_frame(value) and any(one.kind not in "fiu" for one in value.dtypes))


def is_frame(value: Any) -> bool:
    """Return True for a pandas DataFrame, without importing pandas."""
    return hasattr(value, "iloc") and hasattr(value, "columns")


def as_dataset(dataset: Any, who: str) -> Any:
    """Return a ``datasets.Dataset``, converting a DataFrame.

    Args:
        dataset: A Dataset or a DataFrame.
        who: Function named in errors.

    Raises:
        ArgumentError: For a dict of splits, and for a stream, whose length is unknown.
    """
    if is_frame(dataset):
        return optional("datasets", who, extra="text").Dataset.from_pandas(dataset, preserve_index=False)
    if isinstance(dataset, dict):
        raise ArgumentError(who, "one data set", f"a dict of {list(dataset)}", "pass one of them")
    if not hasattr(dataset, "__len__"):
        raise ArgumentError(who, "a data set of known length", type(dataset).__name__, "load it without streaming")
    return dataset


def mine_dataset(
    dataset: Any,
    model: Any = None,
    negatives: Negatives | str | None = None,
    k: int | None = None,
    draw: DrawKind | None = None,
    seed: int = 0,
    *,
    corpus: Sequence[str] | None = None,
    anchor_column_name: str | None = None,
    positive_column_name: str | None = None,
    label_column_name: str | None = None,
    positive_label: Any = None,
    judged_negatives: bool = False,
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
    cache_key: str | None = None,
    verbose: bool = True,
    **named: Any,
) -> Any:
    """Mine negatives for the (anchor, positive) texts of a data set, in a format of sentence-transformers.

    Without ``negatives``, these are the 3 nearest documents that are not positives, as in
    sentence-transformers. Two things differ: a document whose text is that of the query is never
    its negative, and a query has fewer negatives only if the corpus has no more for it. Equal texts
    are one query or one document.

    Args:
        dataset: Data set, or DataFrame, with a column of anchors and one of positives.
        model: A SentenceTransformer, its path, or a function from a list of texts to vectors [b, d].
        negatives: Distribution or its expression.
        k: Number of negatives per query; 3 by default as in sentence-transformers, 5 with ``negatives``.
        draw: ``"top"``, ``"gumbel"`` or ``"categorical"``, as in ``hn.mine``.
        seed: Seed of the draws.
        corpus: Further documents; the positives always belong to the corpus.
        anchor_column_name: Column of the anchors; the first one by default.
        positive_column_name: Column of the positives; the second one by default.
        label_column_name: Column of the labels of pairs; by default a column with a usual name.
        positive_label: Label of the rows that are positives, such as 1. The documents of other rows
            join the corpus. If it is not given, a column that looks like such labels is an error.
        judged_negatives: Whether documents of rows with another label are the first negatives of
            their query.
        temperature: Divisor of the similarities for tilts.
        near_positive: Cosine from which a candidate counts as a near-duplicate of a positive and is
            skipped.
        near_negative: Cosine from which a candidate counts as a near-duplicate of a negative chosen
            before and is skipped.
        search: How candidates are found; exact by default.
        guide: Another model, its path, or a function from texts to vectors, for ``by="guide"``.
        cross_encoder: A CrossEncoder, its path, or a function of (query, document) pairs. It scores
            the nearest candidates, and its scores replace the similarities.
        output_format: ``"triplet"``, ``"n-tuple"``, ``"labeled-pair"``, ``"labeled-list"`` or ``"ids"``.
        output_scores: Whether scores are written.
        query_prompt: Text put before each query.
        query_prompt_name: Name of a prompt of the model for queries, instead of ``query_prompt``.
        corpus_prompt: Text put before each document.
        corpus_prompt_name: Name of a prompt of the model for documents, instead of ``corpus_prompt``.
        batch_size: Number of texts encoded at a time.
        cache_folder: Folder where embeddings are cached by content; not cached by default.
        cache_key: Version of a function used as model, without which its embeddings are not cached.
            Change it whenever the function returns other vectors.
        verbose: Whether progress, the rule and the number of short queries are shown.
        **named: Options of sentence-transformers instead of ``negatives``, ``k`` and ``draw``:
            range_min, range_max, max_score, min_score, absolute_margin, relative_margin,
            num_negatives, sampling_strategy. Using both is an error.

    Returns:
        A ``datasets.Dataset`` of anchors, positives and negatives.

    Raises:
        ArgumentError: If columns or options are missing or contradict each other.
        NoNegatives: If no query has enough negatives for the format.
    """
    if model is None:
        raise ArgumentError("mine", "a model for the texts of a data set", "model=None", "pass model=...")
    dataset = as_dataset(dataset, "mine")
    names = _columns(dataset, anchor_column_name, positive_column_name)
    given = _documents(dataset, names, label_column_name, positive_label)
    problem = _problem(dataset, names, corpus, given)
    if judged_negatives and not problem.judged_negatives:
        raise ArgumentError("mine", "pairs with another label for judged_negatives", "none", "pass positive_label=...")
    sides = texts_of(problem.queries, "mine"), texts_of(problem.corpus, "mine")
    texts = DatasetTexts(sides, batch_size, cache_folder, cache_key)
    rule = translate(named, negatives, k, draw, max(map(len, problem.positives)))
    expression = parse(rule.negatives) if isinstance(rule.negatives, str) else rule.negatives
    console, number = Terminal(quiet=not verbose), counted(len(problem.own), "query", "queries")
    console.print(Text(f"mining {counted(rule.k, 'negative')} of {number}: {expression!r}, draw {rule.draw!r}"))
    with progress_bars(quiet=not verbose) as bars:
        bars("encode", None)
        vectors = texts.embedded(model, (query_prompt, query_prompt_name), (corpus_prompt, corpus_prompt_name))
        rescore = None if cross_encoder is None else PairScorer(pair_scorer(cross_encoder, batch_size), *sides)
        guides = None if guide is None else texts.embedded(guide)
        bars("mine", None)
        mined = mine_vectors(
            Keys(vectors[0], torch.tensor(problem.own)),
            Keys(vectors[1], torch.arange(len(vectors[1])), source="embedding"),
            problem.positives,
            expression,
            rule.k,
            rule.draw,
            seed,
            temperature=temperature,
            near_positive=near_positive,
            near_negative=near_negative,
            similarity="dot",  # of unit vectors
            search=search
            or Search("flat" if rule.use_faiss and rescore is None else "exact", candidates=rule.candidates),
            rescore=rescore,
            guide=guides,
        )
    arrays = (mined.rows.numpy(), mined.scores.numpy(), _positive_scores(problem, vectors, rescore))
    result = Result(problem, *arrays, mined.found_by.numpy(), mined.retrievers)
    if judged_negatives:
        result = with_judged_negatives(result, lambda query, row: _pair_scores(vectors, rescore, query, row))
        mined.explanation.short_after(torch.from_numpy(result.rows))
    if mined.explanation.short:
        short = f"{mined.explanation.short:,} of {number} have fewer than {rule.k} negatives"
        console.print(Text(f"{short}: {mined.explanation.reason()}"))
    layout = Layout(output_format, *names, scores=output_scores)
    if not has_rows(result, layout):
        raise no_negatives(mined.explanation, output_format)
    table = columns_of(result, layout)
    return optional("datasets", "mine(dataset, ...)", extra="text").Dataset.from_dict(table)


def _columns(dataset: Any, anchor: str | None, positive: str | None) -> tuple[str, str]:
    """Return the columns of anchors and positives: the named ones, or the first two."""
    known = list(dataset.column_names)
    if not len(dataset) or len(known) < 2:
        raise ArgumentError("mine", "rows of an anchor and a positive", f"{len(dataset)} rows of columns {known}")
    for name, value in (("anchor_column_name", anchor), ("positive_column_name", positive)):
        if value is not None and value not in known:
            raise argument_error("mine", f"a column among {known}", name, value)
    return anchor or known[0], positive or known[1]


def _documents(dataset: Any, names: tuple[str, str], column: str | None, label: Any) -> JudgedDocuments | None:
    """Return the documents of each row by its label; None if no label is wanted and no column looks like one."""
    if label is None and column is not None:
        raise argument_error("mine", "positive_label for the column of labels", "label_column_name", column)
    if label is None:
        known = [name for name in dataset.column_names if is_label(name) or name == names[1]]
        fix = "or mine a data set without the column: dataset.remove_columns(...)"
        check_no_label_ignored("mine", {name: column_of(dataset, name) for name in known}, names, names[1], fix)
        return None
    name = label_column(dataset.column_names, column, "mine", "label_column_name")
    rows = [[one] for one in column_of(dataset, names[1])]
    return JudgedDocuments(*split_by_label(rows, column_of(dataset, name), label, "mine", "positive_label"))


def _problem(
    dataset: Any, names: tuple[str, str], corpus: Sequence[str] | None, given: JudgedDocuments | None = None
) -> Problem:
    """Return queries, documents and positives; documents are in the order of sentence-transformers."""
    anchors, positives = (column_of(dataset, name) for name in names)
    for name, column in zip(names, (anchors, positives), strict=True):
        if wrong := [row for row, one in enumerate(column) if not isinstance(one, str) or not one.strip()]:
            value = column[wrong[0]]
            fix = "name the columns of texts: anchor_column_name=..., positive_column_name=..."
            if isinstance(value, str | None):
                fix = f"leave such rows out: dataset.filter(lambda row: (row[{name!r}] or '').strip())"
            got = f"{name}={value!r} in row {wrong[0]} ({counted(len(wrong), 'such row')} in all)"
            raise ArgumentError("mine", "texts in every row", got, fix)
    others = [] if corpus is None else list(corpus)
    odd = [one for one in others if not isinstance(one, str)]
    if odd or isinstance(corpus, str):
        raise argument_error("mine", "a list of texts as corpus", "corpus", odd[:1] or corpus)
    documents = list(dict.fromkeys([*others, *positives]))
    first, second = (Side(list(range(len(texts))), texts, named=False) for texts in (anchors, documents))
    own = [[one] for one in positives] if given is None else given.positives
    return build_problem(first, second, own, irrelevant=None if given is None else given.irrelevant)


Prompt = tuple[str | None, str | None]
"""(text of a prompt, name of a prompt of the model); at most one of them is given."""


@dataclass(frozen=True)
class DatasetTexts:
    """The texts of queries and documents, and how they are encoded.

    Attributes:
        sides: Texts of the queries and texts of the documents.
        batch_size: Number of texts encoded at a time.
        cache: Folder of the embedding cache, or None.
        cache_key: Declared version of a function used as model.
    """

    sides: tuple[list[str], list[str]]
    batch_size: int
    cache: str | None
    cache_key: str | None

    def embedded(self, model: Any, *prompts: Prompt) -> tuple[Tensor, Tensor]:
        """Return unit vectors of the queries [q, d] and of the documents [n, d].

        Args:
            model: A SentenceTransformer, its path, or a function from texts to vectors.
            *prompts: The prompt of the queries and that of the documents, or nothing.
        """
        if isinstance(model, str):
            library = optional("sentence_transformers", "mine(model=...)", extra="text")
            with loading_model("mine", model):
                model = library.SentenceTransformer(model)
        first, second = (self._of_side(side, model, prompts[side] if prompts else (None, None)) for side in range(2))
        return first, second

    def _of_side(self, side: int, model: Any, prompt: Prompt) -> Tensor:
        encode = _encode(model, side, prompt, self.batch_size)
        if self.cache is None:
            return unit(torch.from_numpy(vectors_of(encode, self.sides[side])))
        key_of: Any = key_of_model if hasattr(model, "encode") and hasattr(model, "state_dict") else key_of_function
        key = key_of("", model, self.cache_key)
        if key is None:
            warn_not_reused(f"The output of {getattr(model, '__qualname__', type(model).__qualname__)}")
        encoder = KeyedEncoder(key and f"{key} {side} {prompt!r}", encode)
        return unit(embed(self.sides[side], encoder, Path(self.cache), Ranks()))


def _encode(model: Any, side: int, prompt: Prompt, size: int) -> EncodeTexts:
    """Return a function from texts to vectors that applies the model with the prompt of one side (0: queries)."""
    plain = getattr(model, "encode", None)
    if plain is None:
        check_callable("mine", "model", model, "a SentenceTransformer, its path, or a function from texts to vectors")
        if any(prompt):
            raise ArgumentError("mine", "a SentenceTransformer for prompts", "a function", "add them in the function")
        return lambda texts: each if isinstance(each := model(texts), Tensor) else np.asarray(each, np.float32)
    encode = getattr(model, ("encode_query", "encode_document")[side], plain)
    return lambda texts: encode(
        texts,
        batch_size=size,
        normalize_embeddings=True,
        convert_to_numpy=True,
        show_progress_bar=False,
        prompt=prompt[0],
        prompt_name=prompt[1],
    )


def _positive_scores(problem: Problem, vectors: tuple[Tensor, Tensor], rescore: PairScorer | None) -> Any:
    """Return the scores of all positives, concatenated query by query."""
    count = torch.tensor([len(rows) for rows in problem.positives])
    query = torch.repeat_interleave(torch.arange(len(count)), count)
    rows = torch.tensor([row for own in problem.positives for row in own])
    return _pair_scores(vectors, rescore, query, rows).numpy()


def _pair_scores(vectors: tuple[Tensor, Tensor], rescore: PairScorer | None, query: Tensor, rows: Tensor) -> Tensor:
    return rescore(query, rows) if rescore is not None else (vectors[0][query] * vectors[1][rows]).sum(-1)


_rule_options = ("range_min", "range_max", "max_score", "min_score", "absolute_margin", "relative_margin")
_counterparts = {"num_negatives": "k", "sampling_strategy": "draw"}
_speed_options = ("use_faiss", "faiss_batch_size")
_unsupported = {
    "include_positives": "mine without it, and add the positives to a set for evaluation",
    "use_multi_process": "encode with several processes before, or use `torchrun -m hardneg mine`",
    "as_triplets": "use output_format",
    "margin": "use absolute_margin",
}


@dataclass(frozen=True)
class Translated:
    """The translated options.

    Attributes:
        negatives: Distribution or its expression.
        k: Number of negatives per query.
        draw: How they are drawn.
        candidates: Number of candidates that a cross-encoder scores.
        use_faiss: Whether FAISS searches.
    """

    negatives: Negatives | str
    k: int
    draw: DrawKind
    candidates: int
    use_faiss: bool = False


def translate(
    named: dict[str, Any], negatives: Negatives | str | None, k: int | None, draw: DrawKind | None, most_positives: int
) -> Translated:
    """Return the rule given in either vocabulary.

    Args:
        named: Options of sentence-transformers by name.
        negatives: Distribution in our vocabulary, or None.
        k: Number of negatives in our vocabulary, or None.
        draw: Draw in our vocabulary, or None.
        most_positives: Largest number of positives of a query.

    Raises:
        ArgumentError: If both vocabularies are used, or an option has no counterpart here.
        UnknownName: If a name is in neither vocabulary.

    Example:
        >>> translate({"range_min": 5, "max_score": 0.8}, None, None, None, 1).negatives
        'AtMost(0.8) * Rank(5)'
    """
    for name, value in named.items():
        if name in _unsupported and value:
            raise ArgumentError("mine", f"no {name}", f"{name}={value!r}", _unsupported[name])
        if name not in (*_rule_options, *_counterparts, *_speed_options, *_unsupported):
            raise UnknownName(name, ["negatives", "k", "draw", *_rule_options, *_counterparts, *_speed_options])
    given = {name: value for name, value in named.items() if value is not None}
    twice = [name for name in _rule_options if name in given and negatives is not None]
    twice += [
        name for name, ours in _counterparts.items() if name in given and {"k": k, "draw": draw}[ours] is not None
    ]
    if twice:
        raise ArgumentError(
            "mine", "an expression or the options of sentence-transformers", f"both, {twice[0]} among the latter"
        )
    default = 3 if negatives is None else MineOptions.k
    k = check_count("mine", "k", given.get("num_negatives", default) if k is None else k)
    for name in ("range_min", "range_max"):
        if name in given:
            given[name] = check_count("mine", name, given[name], least=0)
    strategy = given.get("sampling_strategy", "top")
    check_among("mine", "sampling_strategy", strategy, ("top", "random"))
    draw = draw or ("top" if strategy == "top" else "gumbel")
    last = given.get("range_max") or _last_rank(given, k, most_positives)
    if negatives is None:
        stop = last if "range_max" in given or draw != "top" else None
        negatives = _expression(given, stop)
    faiss = bool(given.get("use_faiss"))
    return Translated(negatives, k, draw, last if "range_max" in given else max(100, last), faiss)


def _last_rank(given: dict[str, Any], k: int, most_positives: int) -> int:
    """Return the range_max that sentence-transformers uses if none is given."""
    filters = any(name in given for name in ("absolute_margin", "relative_margin", "max_score"))
    return int(given.get("range_min", 0)) + (10 * k if filters else k) + most_positives


def _expression(given: dict[str, Any], stop: int | None) -> str:
    margins = [f"{name}={given[f'{name}_margin']!r}" for name in ("relative", "absolute") if f"{name}_margin" in given]
    parts = [f"BelowPositive({', '.join(margins)})"] if margins else []
    parts += [f"AtMost({float(given['max_score'])!r})"] if "max_score" in given else []
    parts += [f"Threshold({float(given['min_score'])!r})"] if "min_score" in given else []
    start = given.get("range_min", 0)
    if stop is not None and start >= stop:
        raise argument_error("mine", f"a range_min below range_max={stop}", "range_min", start)
    if start or stop is not None:
        parts.append(f"Rank({start})" if stop is None else f"Rank({start}, {stop})")
    return " * ".join(parts) or "Uniform()"
