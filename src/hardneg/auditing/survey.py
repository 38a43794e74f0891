"""The rules one after the other over chunks of anchors, each against all candidates.

Exact: everything, where every anchor is looked at. With a sample of anchors, means over anchors are unbiased and carry
a standard error; hubness is unbiased; the hub share is too large and the coverage too small, the more so the fewer
anchors there are. The candidates are never sampled: ranks and quantiles are those of the whole corpus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.auditing.measure import Chunk, Tally
from hardneg.auditing.result import Audit, Row, with_frontier
from hardneg.auditing.rules import NamedRule, check_rules, default_rules, thresholds
from hardneg.auditing.samples import PairCounts
from hardneg.auditing.settings import Settings
from hardneg.auditing.subject import Subject
from hardneg.auditing.suggest import GridSearch, suggestions
from hardneg.core.errors import ArgumentError

_chunk = 1 << 19  # scores at a time: what a processor's cache holds
_diagnosed = 1 << 19  # scores that diagnose looks at, which costs more than all the rest
_least_diagnosed = 16
_for_thresholds = 1 << 22


def audit_subject(
    subject: Subject,
    given: Sequence[NamedRule],
    settings: Settings,
    *,
    listed: Annotated[Tensor, "a k"] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """The audit of what was put together, with the lists of a mined file as one more rule."""
    rows = sampled_anchors(subject, settings)
    rules = [NamedRule("mined", "mined", listed=listed)] if listed is not None else []
    rules += given
    if settings.frontier:
        some = rows[: min(64, max(1, _for_thresholds // len(subject.candidates)))]
        rules += default_rules(subject.has_positives, thresholds(subject.scores(some, 1.0)), rules)
    tags = (subject.anchor_tags, subject.candidate_tags)
    check_rules(
        rules,
        positives=subject.has_positives,
        labels=all(tag.labels is not None for tag in tags),
        groups=all(tag.clusters is not None for tag in tags),
    )
    if not rules:
        raise ArgumentError("audit", "at least one expression", "none and frontier=False")
    if settings.wanted_false_negatives is not None and not subject.judges:
        raise ArgumentError(
            "audit", "labels, groups or judgements to suggest rules at a share of false negatives", "none"
        )
    passes = 1 if settings.wanted_false_negatives is None else 2
    report = _reporter(progress, passes * len(rows))
    pairs = PairCounts()
    found, random, own, diagnosed = measured(subject, rules, rows, settings, report, pairs)
    # On few candidates a default rule may leave no anchor a negative; this is not reported.
    found = [row for row in found if row.kind != "default" or row.without_negatives < 1]
    ideas: list[Any] = []
    if settings.wanted_false_negatives is not None:
        search = GridSearch(subject, settings.wanted_false_negatives, settings.temperature)
        for chunk in chunks(subject, rows, settings):
            search.add(chunk)
            report(len(chunk.rows))

        def measure(rules: list[NamedRule]) -> list[Row]:
            return measured(subject, rules, rows, settings, lambda done: None)[0]

        ideas, extra = suggestions(search, measure)
        names = {row.expression for row in found}
        found += [row for row in extra if row.expression not in names]
    return Audit(
        rows=with_frontier(found),
        suggestions=tuple(ideas),
        num_anchors=len(rows),
        num_anchors_in_all=len(subject.askable_rows()),
        num_candidates=len(subject.candidates),
        num_diagnosed=diagnosed,
        judges=subject.judges,
        positives=_source_of_positives(subject),
        temperature=settings.temperature,
        tau_plus=settings.tau_plus,
        near_duplicate=settings.near_duplicate,
        wanted_false_negatives=settings.wanted_false_negatives,
        seed=settings.seed,
        random_similarity=random,
        positive_similarity=own,
        notes=_notes(subject, settings),
        similarities=pairs.found(),
    )


def sampled_anchors(subject: Subject, settings: Settings) -> Annotated[Tensor, "m"]:
    """Anchors without replacement, in the order in which they were drawn."""
    rows = subject.askable_rows()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
    return rows[order[: settings.num_anchors]].to(subject.anchors.device)


def chunks(subject: Subject, rows: Tensor, settings: Settings) -> Iterator[Chunk]:
    size = max(1, _chunk // len(subject.candidates))
    seen = 0
    for part in rows.split(size):  # type: ignore[no-untyped-call]
        first = seen < max(_least_diagnosed, _diagnosed // len(subject.candidates))
        yield Chunk.of(subject, part, settings.temperature, settings.near_duplicate, first)
        seen += len(part)


def measured(
    subject: Subject,
    rules: Sequence[NamedRule],
    rows: Tensor,
    settings: Settings,
    report: Callable[[int], None],
    pairs: PairCounts | None = None,
) -> tuple[list[Row], float, float, int]:
    """The rows of the rules, mean similarities of all candidates and of the positives, and how many were diagnosed."""
    tallies = [Tally(rule, len(subject.candidates)) for rule in rules]
    random: list[float] = []
    own: list[float] = []
    diagnosed = 0
    for chunk in chunks(subject, rows, settings):
        for tally in tallies:
            tally.add(chunk, settings.tau_plus)
        scores = chunk.scores
        some = scores.valid.any(-1)
        mean = (chunk.similarity * scores.valid).sum(-1).double() / chunk.num_valid
        random += mean[some].tolist()
        own += (scores.positives[scores.positive_valid].double() * settings.temperature).tolist()
        diagnosed += len(chunk.rows) if chunk.diagnosed else 0
        if pairs is not None:
            pairs.add(chunk, settings.temperature)
        report(len(chunk.rows))
    size = len(subject.askable_rows())
    found = [tally.row(subject, size) for tally in tallies]
    return found, _mean(random), _mean(own), diagnosed


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _source_of_positives(subject: Subject) -> str:
    if subject.views is not None:
        return "a second view of each anchor"
    return "none" if subject.pairs is None else "rows of the candidates"


def _notes(subject: Subject, settings: Settings) -> tuple[str, ...]:
    notes = []
    if not subject.judges:
        notes.append("No labels, groups or judgements: which negatives are false is not known.")
    if not subject.has_positives:
        notes.append("No positives: BelowPositive and the clamped share have no answer.")
    left = len(subject.anchors) - len(subject.askable_rows())
    if left:
        notes.append(f"{left:,} queries without a judgement were left out.")
    labels = subject.anchor_tags.labels
    if labels is not None and bool((labels < 0).any()):
        notes.append(f"{int((labels < 0).sum()):,} anchors have no label and do not count for false negatives.")
    if "judgements" in subject.judges:
        notes.append("Judgements are incomplete: pairs without a judgement do not count as false negatives.")
    return tuple(notes)


def _reporter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    return (lambda done: None) if progress is None else (lambda done: progress(done, total))
