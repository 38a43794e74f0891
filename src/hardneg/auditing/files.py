"""Files in, an audit out: the work of `hardneg audit` for embeddings, a run directory or mined negatives.

``audit_files`` finds out which of these the input is (``kind_of``) and checks the options; ``sampling.audit_pairs``
measures what is read here. For a mined file, ``audit_mined`` finds the queries and the corpus (``Origin``) from the
options or, if these name nothing, from the manifest written with the file. Without vectors only its lists are audited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.batches import with_batches
from hardneg.auditing.findings import find_problems, rows_of_lists
from hardneg.auditing.inputs import (
    WHO,
    JudgedLists,
    Lists,
    RunRecord,
    check_columns_found,
    is_mined,
    is_run,
    judged_lists,
    read_lists,
    read_side,
    read_tags,
    rows_by_name,
    split_of_run,
)
from hardneg.auditing.judged import with_judged
from hardneg.auditing.options import AuditOptions as AuditOptions
from hardneg.auditing.options import check_unused
from hardneg.auditing.prepare import make_audited_pairs
from hardneg.auditing.result import Audit, MinedFindings
from hardneg.auditing.rules import given_rules
from hardneg.auditing.sampling import audit_pairs, sample_lists
from hardneg.core.errors import ArgumentError, DataChanged, HardnegError, NoFile, argument_error
from hardneg.core.types import Keys
from hardneg.io.provenance import environment
from hardneg.io.tables import column_names, read_vectors, suffix_of, vector_suffixes
from hardneg.mining.encode import cached, embed
from hardneg.mining.engines import Ranks
from hardneg.mining.inputs import StageProgress, load_encoders, load_problem, quiet
from hardneg.mining.judgements import numbered_both
from hardneg.mining.manifest import manifest_of_file, mine_options, similarity_of, whole_number
from hardneg.mining.options import MineOptions
from hardneg.mining.problem import Side

AuditProgress = Callable[[int, int], None]
"""Called with (anchors done, anchors in all)."""


@contextmanager
def as_audit_errors() -> Iterator[None]:
    """Rename the caller in errors of readers that mining and audits share: "mine" becomes "audit"."""
    try:
        yield
    except HardnegError as error:
        if error.who == "mine":
            error.who = "audit"
            error.args = ("audit", *error.args[1:])
        raise


def audit_files(options: AuditOptions, progress: AuditProgress | None = None, encoding: StageProgress = quiet) -> Audit:
    """Audit embeddings, a run or a mined file, whichever the input is.

    Args:
        options: Paths, rules and settings.
        progress: Called with (anchors done, anchors in all).
        encoding: Progress of encoding texts, as in mining.

    Returns:
        The audit, whose provenance has the command, the versions and the kind of the input.

    Raises:
        NoFile: If an input does not exist, or a run is not finished.
        ArgumentError: If an option does not fit the input.
    """
    with as_audit_errors(), torch.no_grad():
        kind = kind_of(options)
        check_unused(options, kind)
        run = RunRecord.of(Path(options.input)) if kind == "run" else RunRecord()
        chosen = run.temperature if options.temperature is None else options.temperature
        if chosen is not None:
            options = replace(options, settings=replace(options.settings, temperature=chosen))
        if kind == "mined":
            found = audit_mined(options, progress, encoding)
        else:
            audited = load_audited_pairs(options, kind)
            found = audit_pairs(audited, given_rules(options.negatives), options.settings, progress=progress)
            found = with_batches(found, audited, options.batches, options.batch_size)
        found = with_judged(found, options.judged)
    provenance = {**environment(), "input": options.input, "kind": kind, "title": run.title}
    return replace(found, provenance=provenance, notes=(*run.notes(options.temperature), *found.notes))


def kind_of(options: AuditOptions) -> str:
    """Return ``"embeddings"``, ``"run"`` (a run directory or its embeddings.npz) or ``"mined"``.

    A run is recognised by its four arrays, a mined file by its columns or its manifest, and a table of embeddings by a
    column named embedding or vector.

    Raises:
        NoFile: If the input does not exist or is a run without embeddings.
        ArgumentError: If the columns of a table are none of these.
    """
    path = Path(options.input)
    if not path.exists():
        raise NoFile("audit", "a file or folder that exists", path)
    if options.embedding_column is None and is_run(path):
        return "run"
    if (path / "config.json").exists():
        fix = "give its command again with --resume"
        raise NoFile("audit", "a finished run", path / "embeddings.npz", "which is missing", fix)
    if suffix_of(path) in vector_suffixes:
        return "embeddings"
    names = column_names(path, WHO)
    if options.embedding_column in names:
        return "embeddings"
    if is_mined(names) or Path(f"{path}.manifest.json").exists():
        return "mined"
    if {"embedding", "embeddings", "vector", "vectors"} & set(names):
        return "embeddings"
    what = "embeddings (.npy, .npz, .safetensors, a table with a column of them), a run, or a mined file"
    raise ArgumentError("audit", what, f"{path} with columns {names}")


def load_audited_pairs(options: AuditOptions, kind: str) -> AuditedPairs:
    """Read embeddings with their labels, groups and judgements, and the corpus if the options name one.

    Args:
        options: Paths and columns.
        kind: ``"embeddings"`` or ``"run"``, from ``kind_of``.
    """
    if kind == "run":
        vectors, known = split_of_run(Path(options.input), options.split or "test")
        anchors = Side(range(len(vectors)), None, vectors, known.tolist(), named=False)
    else:
        anchors = read_side(options, "queries", options.queries, options.input)
    corpus = read_side(options, "corpus", options.corpus, options.corpus_embeddings) if options.has_corpus else None
    candidates = anchors if corpus is None else corpus
    if candidates.vectors is None:
        raise ArgumentError(WHO, "embeddings of the corpus", "none", "give --corpus-embeddings")
    check_columns_found(options, anchors, *([] if corpus is None else [corpus]))
    own, others = _tags(options, anchors, corpus)
    tags = others.get("labels"), others.get("groups")
    keys = None if corpus is None else Keys(candidates.vectors, labels=tags[0], clusters=tags[1])
    assert anchors.vectors is not None
    judged, held_out = (
        _judged(path, anchors, candidates) for path in (options.judgements, options.held_out_judgements)
    )
    audited = make_audited_pairs(
        anchors.vectors,
        keys,
        positives=_own_positives(options, anchors.vectors),
        judgements=judged and judged.relevant,
        judged_negatives=judged and judged.irrelevant,
        held_out_judgements=held_out and held_out.relevant,
        **own,
        normalize=options.similarity != "dot",
        seed=options.settings.seed,
    )
    return replace(audited, names=tuple(candidates.ids) if candidates.named else None)


def _tags(options: AuditOptions, anchors: Side, corpus: Side | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the labels and groups of the anchors and of the corpus, which must have them too if there is one."""
    own: dict[str, Any] = {}
    others: dict[str, Tensor] = {}
    for word, column in (("labels", options.label_column), ("groups", options.group_column)):
        first, path = getattr(anchors, word), getattr(options, word)
        if corpus is None:
            own[word] = first if path is None else read_tags(word, path, column)
        elif first is not None and getattr(corpus, word) is not None:
            sizes = len(anchors), len(corpus)
            own[word], others[word] = numbered_both(word, first, getattr(corpus, word), sizes, WHO)
    if corpus is not None and options.judgements is None and options.held_out_judgements is None and not own:
        what = "judgements (query id, document id) for queries and a corpus, or labels or groups of both"
        raise ArgumentError(WHO, what, "none", "give --judgements, or --label-column")
    return own, others


def _judged(path: str | None, anchors: Side, candidates: Side) -> JudgedLists | None:
    """Read judgements as rows of the candidates; None without a path."""
    if path is None:
        return None
    return judged_lists(path, rows_by_name(anchors.ids), rows_by_name(candidates.ids), len(anchors))


def _own_positives(options: AuditOptions, vectors: Tensor) -> Tensor | str | None:
    """Return the vectors of a second view [a, d], ``"label"``, or None."""
    if options.positives is None or options.positives == "label":
        return options.positives
    views = read_vectors(options.positives, options.embedding_column, WHO)[0]
    if views.shape != vectors.shape:
        got = f"{tuple(views.shape)} in {options.positives}"
        raise ArgumentError(WHO, f"a second view {tuple(vectors.shape)} as positives", got)
    return views


@dataclass(frozen=True, eq=False)
class Origin:
    """The queries and documents that a file was mined from, where they can be found.

    Attributes:
        queries: The queries; None if unknown.
        corpus: The documents; None if unknown.
        notes: Remarks for the audit, such as what could not be read.
        judgements: File of judgements, from the options or the manifest.
    """

    queries: Side | None = None
    corpus: Side | None = None
    notes: tuple[str, ...] = ()
    judgements: str | None = None

    def without_vectors(self) -> list[tuple[str, Side]]:
        """Return the sides that have texts but no vectors, with their names."""
        sides = {"queries": self.queries, "corpus": self.corpus}
        known = [(what, side) for what, side in sides.items() if side is not None]
        return [(what, side) for what, side in known if side.vectors is None and side.texts is not None]


def audit_mined(
    options: AuditOptions, progress: Callable[[int, int], None] | None = None, encoding: StageProgress = quiet
) -> Audit:
    """Audit the lists of a mined file and, where vectors are available, compare its hardness with other rules.

    Args:
        options: The file, and optionally what it was mined from.
        progress: Called with (anchors done, anchors in all).
        encoding: Progress of encoding texts, as in mining.

    Raises:
        ArgumentError: If none of the file's ids or texts occur in the queries or documents given.
        DataChanged: If the manifest, or a file that it names, is not the one of the mining job.
    """
    manifest = manifest_of_file(options.input)
    recorded = manifest.get("options")
    recorded = recorded if isinstance(recorded, dict) else {}
    options = replace(options, similarity=options.similarity or similarity_of(recorded))
    lists = read_lists(options.input, whole_number(recorded.get("k")))
    named = options.names_origin
    origin = _given_origin(options, lists, encoding) if named else _origin_of_manifest(options, manifest, encoding)
    row_of = _rows_of(lists.documents(), origin.corpus, "documents")
    where = _rows_of(lists.queries, origin.queries, "queries")
    found = _findings(lists, origin, row_of, where, _queries_without(manifest, lists))
    kept = lists.only([i for i, name in enumerate(lists.queries) if name in where])
    queries, corpus = origin.queries, origin.corpus
    if corpus is None or queries is None or corpus.vectors is None or queries.vectors is None:
        notes = _without_vectors(origin, kept, where, row_of, options.held_out_judgements)
        return _lists_only(options, found, (*origin.notes, *notes))
    rows = [where[name] for name in kept.queries]
    positives = [[row_of[name] for name in own if name in row_of] for own in kept.positives]
    judged, held_out = (_judgements_of(path, origin, rows) for path in (origin.judgements, options.held_out_judgements))
    pairs = make_audited_pairs(
        queries.vectors[rows],
        Keys(corpus.vectors),
        positives=positives if any(positives) else None,
        judgements=judged and judged.relevant,
        judged_negatives=judged and judged.irrelevant,
        held_out_judgements=held_out and held_out.relevant,
        normalize=options.similarity != "dot",
        seed=options.settings.seed,
    )
    names = tuple(corpus.ids if corpus.named or corpus.texts is None else corpus.texts)
    given = given_rules(options.negatives)
    listed = rows_of_lists(kept, row_of)
    audited = audit_pairs(replace(pairs, names=names), given, options.settings, listed=listed, progress=progress)
    return replace(audited, mined=found, notes=(*audited.notes, *origin.notes, *_lost(lists, where, row_of)))


def _findings(
    lists: Lists, origin: Origin, row_of: dict[Any, int], where: dict[Any, int], queries_without: int | None
) -> MinedFindings:
    """Return the problems of the lists, with a few lists as texts where these are known."""
    corpus = origin.corpus
    text_of = _texts_of(corpus, row_of)
    query_text = _texts_of(origin.queries, where)
    found = find_problems(
        lists,
        text_of=text_of or None,
        row_of=None if corpus is None else row_of,
        vectors=None if corpus is None else corpus.vectors,
        num_documents=None if corpus is None else len(corpus),
        queries_without=queries_without,
    )
    samples = sample_lists(lists, lambda name: query_text.get(name, name), lambda name: text_of.get(name, name))
    return replace(found, samples=samples)


def _texts_of(side: Side | None, rows: dict[Any, int]) -> dict[Any, str]:
    """Map each name of the file to its text; empty if the texts are unknown."""
    texts = None if side is None else side.texts
    return {} if texts is None else {name: texts[row] for name, row in rows.items()}


def _judgements_of(path: str | None, origin: Origin, rows: Sequence[int]) -> JudgedLists | None:
    """Read judgements as rows of the corpus, for these rows of the queries."""
    if path is None or origin.queries is None or origin.corpus is None:
        return None
    # Sides without ids have row numbers as ids, which judgements then use.
    places = {str(origin.queries.ids[row]): place for place, row in enumerate(rows)}
    documents = {str(name): row for row, name in enumerate(origin.corpus.ids)}
    return judged_lists(path, places, documents, len(rows))


def _without_vectors(
    origin: Origin, lists: Lists, where: dict[Any, int], row_of: dict[Any, int], held_out: str | None
) -> Iterable[str]:
    """Yield notes on what remains unknown without vectors; judgements need only ids."""
    rows = [where[name] for name in lists.queries]
    judged = _judgements_of(held_out or origin.judgements, origin, rows)
    if judged is None:
        yield "The vectors are not available, so how similar and how false the negatives are is not known."
    else:
        yield "The vectors are not available, so how similar the negatives are is not known."
        yield _by_judgements(lists, judged, row_of, held_out=held_out is not None)
    yield "Give --model, --encoder, or embeddings of queries and corpus for more."


def _by_judgements(lists: Lists, judged: JudgedLists, row_of: dict[Any, int], *, held_out: bool) -> str:
    """Describe how many negatives are judged relevant and, unless held out, how many are judged at all."""
    each = zip(lists.negatives, judged.relevant, judged.irrelevant, strict=True)
    chosen = [one for one in each if one[1] or not held_out]
    known = [(row_of[name], own, others) for names, own, others in chosen for name in names if name in row_of]
    false = sum(row in own for row, own, _ in known)
    share = f"{false} of {len(known)} negatives ({false / max(len(known), 1):.1%}) are judged relevant to their query"
    if held_out:
        return f"{share}, by the held-out judgements of {len(chosen):,} queries."
    seen = sum(row in own or row in others for row, own, others in known)
    if not seen:
        return f"None of {len(known)} negatives is judged: how many are false is not known."
    return f"At least {share}; {seen} are judged at all ({seen / max(len(known), 1):.1%})."


def _given_origin(options: AuditOptions, lists: Lists, encoding: StageProgress) -> Origin:
    """Read queries and corpus as the options name them; a model or encoder embeds texts that have no vectors."""
    corpus = read_side(options, "corpus", options.corpus, options.corpus_embeddings) if options.has_corpus else None
    queries = None
    if options.queries is not None or options.query_embeddings is not None:
        queries = read_side(options, "queries", options.queries, options.query_embeddings)
    elif all(isinstance(name, str) for name in lists.queries):
        queries = Side(range(len(lists.queries)), [str(name) for name in lists.queries], named=False)
    origin = Origin(queries, corpus, judgements=options.judgements)
    if options.model is None and options.encoder is None:
        return origin
    if corpus is None or queries is None or not origin.without_vectors():
        what = "queries and corpus with texts and without embeddings for a model"
        raise argument_error(WHO, what, "model", options.model or options.encoder)
    return _encoded(options, origin, encoding)


def _encoded(options: AuditOptions, origin: Origin, encoding: StageProgress) -> Origin:
    """Embed the texts that have no vectors with the model or function that the options name."""
    how: dict[str, Any] = {"model": options.model, "encoder": options.encoder, "cache_key": options.cache_key}
    encoders = load_encoders(MineOptions("", "", **how))
    encoder_of = dict(zip(("queries", "corpus"), encoders, strict=True))
    for what, side in origin.without_vectors():
        done = encoding(f"encoding {what}", len(side))
        side.vectors = embed(side.texts or [], encoder_of[what], _cache(options), Ranks(), done)
    return origin


def _cache(options: AuditOptions) -> Path:
    """Return the folder of cached embeddings."""
    return Path(options.cache or f"{options.input.rstrip('/')}.embeddings")


def _origin_of_manifest(options: AuditOptions, manifest: dict[str, Any], encoding: StageProgress) -> Origin:
    """Read the queries and corpus that the manifest names, where they still exist.

    Missing vectors come from the miner's cache, or from the model or function that the options name.
    """
    if not isinstance(manifest.get("options"), dict) or not manifest["options"]:
        what = "The manifest of the file has no options" if manifest else "There is no manifest next to the file"
        return Origin(notes=(f"{what}, and no corpus was named: only the lists are audited.",))
    try:
        mined, notes = mine_options(manifest, Path(options.input).absolute().parent)
        problem = load_problem(mined)
    except DataChanged:
        raise
    except (OSError, ValueError, TypeError, ImportError) as error:
        return Origin(notes=(f"What the manifest names could not be read: {error}",))
    origin = Origin(problem.queries, problem.corpus, notes, options.judgements or mined.judgements)
    if mined.search == "bm25":
        return replace(origin, notes=(*notes, "The file was mined by words alone."))
    if options.model is not None or options.encoder is not None:
        return _encoded(options, origin, encoding)
    return _from_cache(options, manifest.get("encoder"), origin)


def _from_cache(options: AuditOptions, keys: Any, origin: Origin) -> Origin:
    """Return the origin with the vectors that the miner has cached for exactly these texts."""
    notes = origin.notes
    for what, side in origin.without_vectors():
        key = keys.get(what) if isinstance(keys, dict) else None
        side.vectors = cached(side.texts or [], key, _cache(options)) if isinstance(key, str) else None
        if side.vectors is None:
            fix = "name the --model or --encoder to encode the texts, or the --cache that holds them"
            notes = (*notes, f"The embeddings of the {what} are not in {_cache(options)}: {fix}.")
    return replace(origin, notes=notes)


def _rows_of(names: Iterable[Any], side: Side | None, what: str) -> dict[Any, int]:
    """Map each name in the file to its row, by id or by text, whichever matches more names."""
    if side is None:
        return {}
    wanted = dict.fromkeys(names)
    by_id = {str(name): row for row, name in reversed(list(enumerate(side.ids)))}
    by_text = {text: row for row, text in reversed(list(enumerate(side.texts or ())))}
    first = {name: by_id[str(name)] for name in wanted if str(name) in by_id}
    second = {name: by_text[name] for name in wanted if name in by_text}
    found = first if len(first) >= len(second) else second
    if wanted and not found:
        raise ArgumentError(WHO, f"the {what} of the mined file among those given", f"none of {len(wanted)}")
    return found


def _lost(lists: Lists, where: dict[Any, int], row_of: dict[Any, int]) -> tuple[str, ...]:
    """Return notes on the queries and documents of the file that are not in the data given."""
    queries = sum(name not in where for name in lists.queries)
    documents = len({name for name in lists.documents() if name not in row_of})
    counts = [(queries, "queries"), (documents, "documents")]
    return tuple(f"{number:,} {what} of the mined file are not among those given." for number, what in counts if number)


def _queries_without(manifest: dict[str, Any], lists: Lists) -> int | None:
    """Return the number of mined queries without negatives; None if the manifest does not count queries."""
    counts = manifest.get("counts")
    requested = whole_number(counts.get("queries")) if isinstance(counts, dict) else None
    return None if requested is None else max(0, requested - sum(bool(each) for each in lists.negatives))


def _lists_only(options: AuditOptions, found: MinedFindings, notes: Sequence[str]) -> Audit:
    """Return an audit that has findings about the lists but no figures of rules."""
    how = options.settings
    return Audit(
        (), (), 0, 0, found.documents_in_corpus or found.documents, 0, (), "those of the file", how.temperature,
        how.tau_plus, how.near_duplicate, how.wanted_false_negatives, how.seed, math.nan, math.nan, tuple(notes), found,
    )  # fmt: skip
