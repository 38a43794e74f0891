"""The audit of a mined file: its lists, and its place on the frontier if the vectors are available.

What was mined from is taken from the options or, where they name nothing, from the manifest beside the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardneg.auditing.findings import as_rows, find
from hardneg.auditing.inputs import WHO, Documents, judged_lists, side_of
from hardneg.auditing.lists import Lists, read_lists
from hardneg.auditing.manifest import manifest_beside, mine_options, similarity_of, whole_number
from hardneg.auditing.options import AuditOptions
from hardneg.auditing.prepare import make_subject
from hardneg.auditing.result import Audit, MinedFindings
from hardneg.auditing.rules import given_rules
from hardneg.auditing.samples import samples_of
from hardneg.auditing.subject import Subject
from hardneg.auditing.survey import audit_subject
from hardneg.core.errors import ArgumentError, DataChanged, argument_error
from hardneg.core.types import Keys
from hardneg.mining.encode import cached, embed
from hardneg.mining.inputs import Progress as Encoding
from hardneg.mining.inputs import load_encoders, load_problem
from hardneg.mining.judgements import read_judgements
from hardneg.mining.options import MineOptions
from hardneg.mining.problem import Side
from hardneg.mining.ranks import Ranks


@dataclass(frozen=True, eq=False)
class Origin:
    """What a file was mined from, as far as it is known, and what there is to say about it."""

    queries: Documents | None = None
    corpus: Documents | None = None
    notes: tuple[str, ...] = ()


def audit_mined(
    options: AuditOptions,
    progress: Callable[[int, int], None] | None = None,
    encoding: Encoding | None = None,
) -> Audit:
    """What is wrong with the lists and, where vectors are known, how hard and false they are beside other rules."""
    manifest = manifest_beside(options.input)
    recorded = manifest.get("options")
    recorded = recorded if isinstance(recorded, dict) else {}
    options = replace(options, similarity=options.similarity or similarity_of(recorded))
    lists = read_lists(options.input, whole_number(recorded.get("k")))
    encoding = encoding or (lambda what, steps: lambda done: None)
    named = options.names_origin
    origin = _given_origin(options, lists, encoding) if named else _origin_of_manifest(options, manifest, encoding)
    corpus, queries = origin.corpus, origin.queries
    row_of = None if corpus is None else _rows_of(lists.documents(), corpus, "documents")
    where = None if queries is None else _rows_of(lists.queries, queries, "queries")
    text_of = None
    if corpus is not None and corpus.texts is not None and row_of is not None:
        text_of = {name: corpus.texts[row] for name, row in row_of.items()}
    found = find(
        lists,
        text_of=text_of,
        row_of=row_of,
        vectors=None if corpus is None else corpus.vectors,
        num_documents=None if corpus is None else len(corpus.ids),
        queries_without=_without(manifest, lists),
    )
    texts, known = queries.texts if queries is not None else None, where or {}
    found = replace(
        found,
        samples=samples_of(
            lists,
            lambda name: texts[known[name]] if texts is not None and name in known else name,
            lambda name: (text_of or {}).get(name, name),
        ),
    )
    if corpus is None or queries is None or corpus.vectors is None or queries.vectors is None:
        why = "The vectors are not available, so how similar and how false the negatives are is not known."
        return _lists_only(options, found, (*origin.notes, why))
    assert row_of is not None
    assert where is not None
    subject, kept = _subject(options, lists, queries, corpus, where, row_of)
    listed = as_rows(kept, row_of)
    audited = audit_subject(
        subject, given_rules(options.expressions), options.settings, listed=listed, progress=progress
    )
    return replace(audited, mined=found, notes=(*audited.notes, *origin.notes, *_lost(lists, where, row_of)))


def _subject(
    options: AuditOptions,
    lists: Lists,
    queries: Documents,
    corpus: Documents,
    where: dict[Any, int],
    row_of: dict[Any, int],
) -> tuple[Subject, Lists]:
    """The queries of the file against the corpus, with the positives of the file; and the lists of those queries."""
    assert queries.vectors is not None
    assert corpus.vectors is not None
    kept = [i for i, name in enumerate(lists.queries) if name in where]
    lists = Lists(
        [lists.queries[i] for i in kept],
        [lists.positives[i] for i in kept],
        [lists.negatives[i] for i in kept],
        lists.wanted,
    )
    rows = [where[name] for name in lists.queries]
    positives = [[row_of[name] for name in own if name in row_of] for own in lists.positives]
    judged = None
    if options.judgements is not None:
        # By id, or by the number of the row where there are none.
        places = {str(queries.ids[row]): place for place, row in enumerate(rows)}
        documents = {str(name): row for row, name in enumerate(corpus.ids)}
        judged = judged_lists(read_judgements(options.judgements, WHO), places, documents, len(rows))
    subject = make_subject(
        queries.vectors[rows],
        Keys(corpus.vectors),
        positives=positives if any(positives) else None,
        judgements=judged,
        normalize=options.similarity != "dot",
        seed=options.settings.seed,
    )
    names = corpus.ids if corpus.named or corpus.texts is None else corpus.texts
    return replace(subject, names=tuple(names)), lists


def _given_origin(options: AuditOptions, lists: Lists, encoding: Encoding) -> Origin:
    """Queries and corpus as the options say; texts are encoded where there is a model and there are no embeddings."""
    corpus = side_of(options, "corpus", options.corpus, options.corpus_embeddings) if options.has_corpus else None
    queries = None
    if options.queries is not None or options.query_embeddings is not None:
        queries = side_of(options, "queries", options.query_embeddings, options.queries)
    elif all(isinstance(name, str) for name in lists.queries):
        queries = Documents(range(len(lists.queries)), False, [str(name) for name in lists.queries])
    if options.model is None and options.encoder is None:
        return Origin(queries, corpus)
    sides = [side for side in (queries, corpus) if side is not None and side.vectors is None and side.texts is not None]
    if corpus is None or queries is None or not sides:
        raise argument_error(WHO, "texts without embeddings for a model", "model", options.model or options.encoder)
    return _encoded(options, Origin(queries, corpus), encoding)


def _encoded(options: AuditOptions, origin: Origin, encoding: Encoding) -> Origin:
    """Vectors of texts that have none, by the model or function that the options name."""
    encoders = load_encoders(MineOptions("", "", model=options.model, encoder=options.encoder))
    found = []
    for side, encoder, what in zip((origin.queries, origin.corpus), encoders, ("queries", "corpus"), strict=True):
        if side is not None and side.vectors is None and side.texts is not None:
            done = encoding(f"encoding {what}", len(side.texts))
            side = replace(side, vectors=embed(side.texts, encoder, _cache(options), Ranks(), done))
        found.append(side)
    return Origin(found[0], found[1], origin.notes)


def _cache(options: AuditOptions) -> Path:
    return Path(options.cache or f"{options.input.rstrip('/')}.embeddings")


def _origin_of_manifest(options: AuditOptions, manifest: dict[str, Any], encoding: Encoding) -> Origin:
    """What the manifest says the file was mined from, where it is still there.

    Vectors that are in no file come from the miner's cache, or by the model or function that the options name.
    """
    if not isinstance(manifest.get("options"), dict) or not manifest["options"]:
        what = "The manifest beside the file has no options" if manifest else "There is no manifest beside the file"
        return Origin(notes=(f"{what}, and no corpus was named: only the lists are audited.",))
    try:
        mined, notes = mine_options(manifest, Path(options.input).absolute().parent)
        problem = load_problem(mined)
    except DataChanged:
        raise
    except (OSError, ValueError, TypeError, ImportError) as error:
        return Origin(notes=(f"What the manifest names could not be read: {error}",))
    origin = Origin(_documents(problem.queries), _documents(problem.corpus), notes)
    if mined.search == "bm25":
        return replace(origin, notes=(*notes, "The file was mined by words alone."))
    if options.model is not None or options.encoder is not None:
        return _encoded(options, origin, encoding)
    return _from_cache(options, manifest.get("encoder"), origin)


def _from_cache(options: AuditOptions, keys: Any, origin: Origin) -> Origin:
    """Vectors that the miner has kept for exactly these texts."""
    found: list[Documents | None] = []
    notes = origin.notes
    for side, what in ((origin.queries, "queries"), (origin.corpus, "corpus")):
        key = keys.get(what) if isinstance(keys, dict) else None
        if side is not None and side.vectors is None and side.texts is not None:
            vectors = cached(side.texts, key, _cache(options)) if isinstance(key, str) else None
            if vectors is None:
                fix = "name the --model or --encoder to encode the texts, or the --cache that holds them"
                notes = (*notes, f"The embeddings of the {what} are not in {_cache(options)}: {fix}.")
            side = replace(side, vectors=vectors)
        found.append(side)
    return Origin(found[0], found[1], notes)


def _documents(side: Side) -> Documents:
    return Documents(side.ids, side.named, side.texts, side.vectors)


def _rows_of(names: Iterable[Any], side: Documents, what: str) -> dict[Any, int]:
    """Where each name of the file is: by id or by text, whichever finds more."""
    wanted = dict.fromkeys(names)
    by_id = {str(name): row for row, name in reversed(list(enumerate(side.ids)))}
    by_text = {text: row for row, text in reversed(list(enumerate(side.texts or ())))}
    first = {name: by_id[str(name)] for name in wanted if str(name) in by_id}
    second = {name: by_text[name] for name in wanted if name in by_text}
    found = first if len(first) >= len(second) else second
    if wanted and not found:
        raise ArgumentError("audit", f"the {what} of the mined file among those given", f"none of {len(wanted)}")
    return found


def _lost(lists: Lists, where: dict[Any, int], row_of: dict[Any, int]) -> tuple[str, ...]:
    queries = sum(name not in where for name in lists.queries)
    documents = len({name for name in lists.documents() if name not in row_of})
    counts = [(queries, "queries"), (documents, "documents")]
    return tuple(f"{number:,} {what} of the mined file are not among those given." for number, what in counts if number)


def _without(manifest: dict[str, Any], lists: Lists) -> int | None:
    counts = manifest.get("counts")
    requested = whole_number(counts.get("queries")) if isinstance(counts, dict) else None
    return None if requested is None else max(0, requested - sum(bool(each) for each in lists.negatives))


def _lists_only(options: AuditOptions, found: MinedFindings, notes: Sequence[str]) -> Audit:
    how = options.settings
    return Audit(
        (), (), 0, 0, found.documents_in_corpus or found.documents, 0, (), "those of the file", how.temperature,
        how.tau_plus, how.near_duplicate, how.wanted_false_negatives, how.seed, math.nan, math.nan, tuple(notes), found,
    )  # fmt: skip
