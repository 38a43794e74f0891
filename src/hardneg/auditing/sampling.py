"""Measure rules one after the other on chunks of anchors, each compared with all candidates.

If every anchor is measured, all figures are exact. With a sample of anchors, means over anchors are unbiased and have
a standard error, and hubness is unbiased; the hub share is too large and the coverage too small, the more so the fewer
anchors there are. The candidates are never sampled: ranks and quantiles refer to the full corpus.

``audit_pairs`` is the entry, called by ``entry`` and ``files``; ``sample_lists`` draws the lists of a mined file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.inputs import Lists
from hardneg.auditing.measure import AuditChunk, NamedRule, RuleTally
from hardneg.auditing.options import Settings
from hardneg.auditing.result import Audit, Counted, RuleFigures, Sample, Similarities, Suggestion, with_frontier
from hardneg.auditing.rules import GridSearch, check_rules, default_rules, suggestions, thresholds
from hardneg.core.errors import ArgumentError, spelled, warn_once
from hardneg.mining.alignment import Alignment, alignment_of, sentence
from hardneg.mining.pairs import as_pairs
from hardneg.search.histogram import SimilarityCounts
from hardneg.search.nearest import Corpus

BINS = 80  # of the histograms of similarities
NUM_SAMPLES, NUM_NEGATIVES = 4, 3  # lists of a mined file that the page shows, and negatives of each
_chunk = 1 << 19  # scores at a time: they fit into a processor's cache
_diagnosed = 1 << 19  # scores that `diagnose` measures, which costs more than all other figures
_least_diagnosed = 16  # anchors
_for_thresholds = 1 << 22  # scores that the thresholds of default rules are computed from


def audit_pairs(
    audited: AuditedPairs,
    given: Sequence[NamedRule],
    settings: Settings,
    *,
    listed: Annotated[Tensor, "a k"] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Audit prepared pairs, with the lists of a mined file as one more rule.

    Args:
        audited: Anchors, candidates, positives and judgements.
        given: Rules to measure.
        settings: Temperature, sample and further settings.
        listed: Mined negatives as rows of the candidates [a, k], -1 where a list is shorter.
        progress: Called with (anchors done, anchors in all); the grid search counts each anchor again.

    Raises:
        ArgumentError: If there is no rule, or a rule or the search for rules needs data that is missing.
    """
    rows = sample_anchors(audited, settings)
    rules = _checked_rules(audited, given, settings, listed, rows)
    wanted = settings.wanted_false_negatives
    total = len(rows) * (1 if wanted is None else 2)

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total)

    found = measure_rules(audited, rules, rows, settings, report)
    # With few candidates a default rule may leave no anchor a negative; such rules are left out.
    table = [row for row in found.rows if row.kind != "default" or row.without_negatives < 1]
    ideas: list[Suggestion] = []
    if wanted is not None:
        ideas, extra = _suggested(audited, rows, settings, report)
        names = {row.expression for row in table}
        table += [row for row in extra if row.expression not in names]
    return Audit(
        rows=with_frontier(table),
        suggestions=tuple(ideas),
        num_anchors=len(rows),
        num_anchors_in_all=len(audited.rows()),
        num_candidates=len(audited.candidates),
        num_diagnosed=found.diagnosed,
        judges=audited.judges,
        positives=_source_of_positives(audited),
        temperature=settings.temperature,
        tau_plus=settings.tau_plus,
        near_duplicate=settings.near_duplicate,
        wanted_false_negatives=wanted,
        seed=settings.seed,
        random_similarity=_mean(found.random),
        positive_similarity=_mean(found.own),
        notes=(*_notes(audited, found.rows), *_misaligned(audited, table, _mean(found.random))),
        similarities=found.pairs.found(),
    )


class PairCounts(SimilarityCounts):
    """Histograms of the similarities of positives, of known false negatives and of all other candidates."""

    def __init__(self) -> None:
        super().__init__(3, BINS)

    def add_chunk(self, chunk: AuditChunk, temperature: float) -> None:
        """Count the pairs of a chunk of anchors."""
        scores = chunk.scores
        valid = scores.valid.expand_as(chunk.similarity)
        false = valid & chunk.false if chunk.false is not None else torch.zeros_like(valid)
        positives = scores.positives[scores.positive_valid] * temperature
        for kind, pairs in enumerate((positives, chunk.similarity[false], chunk.similarity[valid & ~false])):
            self.add(kind, pairs)

    def found(self) -> Similarities:
        """Return the histograms of this audit."""
        means = zip(self.counts, self.means(), strict=True)
        kinds = [Counted(tuple(counts.tolist()), mean) if counts.any() else None for counts, mean in means]
        return Similarities(tuple(self.edges.tolist()), *kinds)


@dataclass
class Measurements:
    """The figures of all rules on the sampled anchors.

    Attributes:
        rows: Figures of each rule.
        random: Mean similarity of each anchor with all its candidates.
        own: Similarity of each positive pair.
        diagnosed: Number of anchors that ``diagnose`` has measured.
        pairs: Histograms of similarities.
    """

    rows: list[RuleFigures] = field(default_factory=list)
    random: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    diagnosed: int = 0
    pairs: PairCounts = field(default_factory=PairCounts)


def measure_rules(
    audited: AuditedPairs,
    rules: Sequence[NamedRule],
    rows: Tensor,
    settings: Settings,
    report: Callable[[int], None] = lambda done: None,
) -> Measurements:
    """Measure rules on these anchors.

    Args:
        audited: The pairs of the audit.
        rules: Rules to measure.
        rows: Rows of the anchors [m].
        settings: Temperature and further settings.
        report: Called with the number of anchors of every chunk.
    """
    none = torch.zeros(len(audited.candidates), dtype=torch.float64, device=audited.anchors.device)
    tallies = [RuleTally(rule, none.clone(), none.bool()) for rule in rules]
    found = Measurements()
    for chunk in audit_chunks(audited, rows, settings):
        for tally in tallies:
            tally.add(chunk, settings.tau_plus)
        scores = chunk.scores
        mean = (chunk.similarity * scores.valid).sum(-1).double() / chunk.num_valid
        found.random += mean[scores.valid.any(-1)].tolist()
        found.own += (scores.positives[scores.positive_valid].double() * settings.temperature).tolist()
        found.diagnosed += len(chunk.rows) if chunk.diagnosed else 0
        found.pairs.add_chunk(chunk, settings.temperature)
        report(len(chunk.rows))
    found.rows = [tally.row(audited, len(audited.rows())) for tally in tallies]
    return found


def sample_anchors(audited: AuditedPairs, settings: Settings) -> Annotated[Tensor, "m"]:
    """Draw anchors without replacement, in the order in which they were drawn."""
    rows = audited.rows()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
    return rows[order[: settings.num_anchors]].to(audited.anchors.device)


def audit_chunks(audited: AuditedPairs, rows: Tensor, settings: Settings) -> Iterator[AuditChunk]:
    """Yield anchors in chunks; candidates on disk are read once for as many anchors as fit into memory."""
    number = len(audited.candidates)
    size, seen = max(1, _chunk // number), 0
    for some in rows.split(max(size, _num_in_memory(audited.candidates, settings.memory))):  # type: ignore[no-untyped-call]
        for compared in audited.compare(some, settings.near_duplicate).split(size):
            first = seen < max(_least_diagnosed, _diagnosed // number)
            yield AuditChunk.of(audited, compared, settings.temperature, first)
            seen += len(compared.rows)


def sample_lists(lists: Lists, query_text: Callable[[Any], Any], text_of: Callable[[Any], Any]) -> tuple[Sample, ...]:
    """Choose lists spread over a mined file, with a positive and the first negatives of each.

    Args:
        lists: The lists.
        query_text: Text, or else the name, of a query.
        text_of: Text, or else the name, of a document.
    """
    filled = [i for i, names in enumerate(lists.negatives) if names]
    chosen = filled[:: max(1, len(filled) // NUM_SAMPLES)][:NUM_SAMPLES]
    return tuple(
        Sample(
            query_text(lists.queries[i]),
            tuple(text_of(name) for name in lists.positives[i][:1]),
            tuple(text_of(name) for name in lists.negatives[i][:NUM_NEGATIVES]),
        )
        for i in chosen
    )


def _checked_rules(
    audited: AuditedPairs, given: Sequence[NamedRule], settings: Settings, listed: Tensor | None, rows: Tensor
) -> list[NamedRule]:
    """Return the mined lists, the given rules and the default ones, after checking that none lacks its data."""
    rules = [*([] if listed is None else [NamedRule("mined", "mined", listed=listed)]), *given]
    if settings.frontier:
        some = rows[: min(64, max(1, _for_thresholds // len(audited.candidates)))]
        rules += default_rules(audited.has_positives, thresholds(audited.scores(audited.compare(some), 1.0)), rules)
    if not rules:
        fix = f"give {spelled('audit', 'negatives')}, or leave the frontier on"
        raise ArgumentError("audit", "at least one expression", "none and no frontier", fix)
    known = {
        "positives": audited.has_positives,
        "labels": audited.both_have("labels"),
        "groups": audited.both_have("clusters"),
    }
    check_rules(rules, **known)
    if settings.wanted_false_negatives is not None and not audited.judges:
        what = "labels, groups or held-out judgements to suggest rules by their false-negative rate"
        raise ArgumentError("audit", what, "none")
    return rules


def _suggested(
    audited: AuditedPairs, rows: Tensor, settings: Settings, report: Callable[[int], None]
) -> tuple[list[Suggestion], list[RuleFigures]]:
    """Search the grids on the sampled anchors; returns the suggestions and their figures."""
    assert settings.wanted_false_negatives is not None
    search = GridSearch(audited, settings.wanted_false_negatives, settings.temperature)
    for chunk in audit_chunks(audited, rows, settings):
        search.add(chunk)
        report(len(chunk.rows))
    return suggestions(search, lambda rules: measure_rules(audited, rules, rows, settings).rows)


def _num_in_memory(candidates: Corpus, memory: float) -> int:
    """Return the number of anchors whose similarities fit into ``memory`` GiB, or 0 for a corpus of one block.

    An anchor needs a similarity and a near-duplicate flag for each candidate, and temporary products with one block.
    """
    width, blocks = candidates.dtype.itemsize, candidates.blocks()
    each = (width + 1) * len(candidates) + 3 * width * candidates.block
    return int(memory * 2**30) // each if len(blocks) > 1 else 0


def _mean(values: list[float]) -> float:
    """Return the mean, or NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def _misaligned(audited: AuditedPairs, rows: Sequence[RuleFigures], random: float) -> Iterator[str]:
    """Yield notes, also given as warnings, if positives or mined negatives are no closer than random candidates."""
    found = _alignment(audited)
    if found is None:
        return
    if found.lost:
        warn_once("alignment: positives", sentence(found))  # once: audits during training would repeat it
        yield sentence(found)
    mined = next((row for row in rows if row.kind == "mined"), None)
    if mined is not None and found.known and mined.similarity <= random + 2 * mined.similarity_error:
        text = (
            f"The mined negatives are no closer than random candidates (mean similarity {mined.similarity:.3f} against "
            f"{random:.3f}): they were drawn at random, or the ids are not aligned."
        )
        warn_once("alignment: mined negatives", text)
        yield text


def _alignment(audited: AuditedPairs) -> Alignment | None:
    """Compare positives with random pairs; None without positives."""
    if audited.views is not None:
        rows = torch.arange(len(audited.anchors))
        pairs = as_pairs(rows, rows, len(rows))
        return alignment_of(audited.anchors.vectors, audited.views, pairs, cosine=audited.unit)
    if audited.pairs is None:
        return None
    return alignment_of(audited.anchors.vectors, audited.candidates.vectors, audited.pairs, cosine=audited.unit)


def _source_of_positives(audited: AuditedPairs) -> str:
    """Describe where positives come from, for the result."""
    if audited.views is not None:
        return "a second view of each anchor"
    return "none" if audited.pairs is None else "rows of the candidates"


def _notes(audited: AuditedPairs, rows: Sequence[RuleFigures]) -> tuple[str, ...]:
    """Return remarks on what is unknown and which anchors do not count."""
    notes = []
    if not audited.judges:
        notes.append("No labels, groups or judgements: which negatives are false is not known.")
    if not audited.has_positives:
        notes.append("No positives: BelowPositive and the clamped share need them and are left out.")
    left = len(audited.anchors) - len(audited.rows())
    if left:
        kind = "judgement" if audited.held_out is None else "held-out judgement"
        notes.append(f"Queries without a {kind}, which are left out: {left:,}.")
    labels = audited.anchor_tags.labels
    if labels is not None and bool((labels < 0).any()):
        notes.append(f"{int((labels < 0).sum()):,} anchors have no label and do not count for false negatives.")
    if audited.held_out is not None:
        notes.append("Pairs that are not among the held-out judgements count as true negatives.")
    elif audited.judges and not audited.all_judged:
        notes.append(_unknown(rows))
    return tuple(notes)


def _unknown(rows: Sequence[RuleFigures]) -> str:
    """Explain why shares are lower bounds, and which data would give rates."""
    shares = [row.judged_share for row in rows if not math.isnan(row.judged_share)]
    most = max(shares, default=0.0)
    known = f"at most {100 * most:.2g} % of the negatives of a rule are" if most else "no negative is"
    held_out = spelled("audit", "held_out_judgements")
    return (
        f"How many negatives are false is not known: {known} judged. Shares are lower bounds, and no rule is suggested "
        f"on them; a rate takes labels, or {held_out}: relevant pairs that mining has not seen."
    )
