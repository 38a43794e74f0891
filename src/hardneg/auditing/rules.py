"""The rules that an audit measures: those given, the default set of the frontier, and the best of a grid search.

``given_rules`` parses expressions, ``default_rules`` adds the frontier, ``check_rules`` reports missing labels, groups
or positives before the work starts. ``measure`` computes their figures.

A ``GridSearch`` finds the hardest rules whose false-negative rate is at most a given share on the sampled anchors.
Every row of scores is sorted once. Rings, margins and rank windows are then windows of the sorted row, and tilts are
weights over it, so whole grids are searched in one pass. The best member is measured again as an expression. Pairs
that are not judged count as false here: a rule must not be suggested because nobody has judged its negatives.

- ``Tilt(beta)``: beta / temperature from 1/2 to 512 in steps of a factor of 2^(1/4); the largest within the limit.
- ``Ring(0.0, outer)``: FRACTIONS; the narrowest within the limit.
- ``Ring(inner, outer)``: all pairs of FRACTIONS; the one with the most similar negatives within the limit.
- ``BelowPositive(relative=margin)``, alone and with ``* Rank(0, 10)``: MARGINS; the smallest within the limit.

``sampling`` feeds a ``GridSearch`` with chunks and then calls ``suggestions``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.measure import AuditChunk, NamedRule
from hardneg.auditing.result import RuleFigures, Suggestion
from hardneg.core.errors import ArgumentError, spelled
from hardneg.core.types import NEVER, Scores
from hardneg.mining.checks import check_weights
from hardneg.negatives import Negatives, parse
from hardneg.negatives.windows import ROUNDING

Expressions = str | Negatives | Sequence[str | Negatives]
"""One rule or several, as text in the grammar or as distributions."""

# The default rules span easy to hard in every family, so that a frontier appears whatever the data.
DEFAULTS = (
    "Uniform()",
    "Tilt(0.5)",
    "Tilt(1.0)",
    "Tilt(2.0)",
    "Tilt(5.0)",
    "Tilt(10.0)",
    "Tilt(20.0)",
    "Ring(0.0, 0.5)",
    "Ring(0.0, 0.1)",
    "Ring(0.0, 0.01)",
    "Ring(0.1, 0.5)",
    "Ring(0.01, 0.1)",
    "Rank(0, 10)",
    "Rank(10, 100)",
    "Rank(50, 200)",
)
BELOW_POSITIVE = tuple(f"BelowPositive(relative={margin}) * Rank(0, 10)" for margin in (0.0, 0.05, 0.1, 0.2, 0.4))
THRESHOLD_QUANTILES = (0.75, 0.95)
"""Thresholds depend on the data, so the default ones are quantiles of its similarities."""


def given_rules(expressions: Expressions) -> list[NamedRule]:
    """Parse expressions into rules; different distributions with the same text are numbered: ``... (2)``.

    >>> [rule.name for rule in given_rules(["Tilt(2.0)", "Uniform()", "Tilt(2.0)"])]
    ['Tilt(2.0)', 'Uniform()']
    """
    several = [expressions] if isinstance(expressions, (str, Negatives)) else list(expressions)
    rules: dict[Hashable, NamedRule] = {}
    alike: Counter[str] = Counter()
    for one in several:
        if not isinstance(one, (str, Negatives)):
            raise ArgumentError("audit", "expressions as text or distributions", repr(one))
        negatives = parse(one) if isinstance(one, str) else one
        name = repr(negatives)
        # The text of judged pairs names their number, not the pairs: such factors are equal only if identical.
        key = name if all(factor.textual for factor in negatives.factors) else id(negatives)
        if key not in rules:
            alike[name] += 1
            shown = name if alike[name] == 1 else f"{name} ({alike[name]})"
            rules[key] = NamedRule(shown, "given", negatives)
    return list(rules.values())


def default_rules(has_positives: bool, thresholds: Sequence[float], taken: Sequence[NamedRule]) -> list[NamedRule]:
    """Return the default rules of the frontier: every family at several strengths.

    Args:
        has_positives: Whether positives are known, which ``BelowPositive`` needs.
        thresholds: Similarities for ``Threshold``, from the function of that name.
        taken: Rules that were given already; they are left out.
    """
    texts = [*DEFAULTS, *(f"Threshold({value})" for value in dict.fromkeys(thresholds))]
    texts += BELOW_POSITIVE if has_positives else ()
    names = {rule.name for rule in taken}
    rules = [NamedRule(repr(parse(text)), "default", parse(text)) for text in texts]
    return [rule for rule in rules if rule.name not in names]


def check_rules(rules: Sequence[NamedRule], *, positives: bool, labels: bool, groups: bool) -> None:
    """Raise before the work if a rule needs positives, labels, groups or a guide that are missing."""
    for rule in rules:
        if rule.negatives is None:
            continue
        check_weights("audit", rule.negatives)
        for factor in rule.negatives.factors:
            _check_factor(factor, positives, labels, groups)


def _check_factor(factor: Negatives, positives: bool, labels: bool, groups: bool) -> None:
    """Check one factor of a product."""
    reads = factor.reads()
    if "guide" in reads:
        raise ArgumentError("audit", "expressions that need no guide", repr(factor), "use by='score'")
    if "positives" in reads and not positives:
        given, judged = spelled("audit", "positives"), spelled("audit", "judgements")
        fix = f'give {given} (a second view of each row, or "label": one row of the same label) or {judged}'
        raise ArgumentError(repr(factor), "positives", "embeddings without positives", fix)
    for tag, word, known in (("labels", "labels", labels), ("clusters", "groups", groups)):
        if tag in reads and not known:
            fix = f"give {spelled('audit', word)}"
            raise ArgumentError(repr(factor), f"{word} of anchors and candidates", "none", fix)


def thresholds(scores: Scores) -> list[float]:
    """Return the similarities that a quarter and a twentieth of the pairs exceed, rounded to two digits.

    The quantiles are taken from about 100,000 pairs, which is precise enough for two digits.
    """
    values = scores.candidates[scores.valid]
    if not len(values):
        return []
    step = max(1, len(values) // 100_000)
    cut = torch.quantile(
        values[::step].double(), torch.tensor(THRESHOLD_QUANTILES, dtype=torch.float64).to(values.device)
    )
    return [round(value, 2) for value in cut.tolist()]


FRACTIONS = (
    0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4,
    0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0,
)  # fmt: skip
MARGINS = tuple(round(0.01 * step, 2) for step in range(96))
STRENGTHS = tuple(2.0 ** (step / 4) for step in range(36, -5, -1))
TOP = 10  # width of the rank window below the positive
_tries = 4  # members measured per family before giving up


@dataclass(frozen=True)
class Family:
    """A grid of expressions of one kind.

    Attributes:
        name: Name of the family in the result.
        best: Description of the member that is chosen.
        texts: The expressions, from the hardest to the easiest if ``ordered``.
        ordered: Whether the order is known in advance; otherwise similarity decides.
    """

    name: str
    best: str
    texts: tuple[str, ...]
    ordered: bool = True


def families(temperature: float, has_positives: bool) -> list[Family]:
    """Return the grids that are searched.

    Args:
        temperature: Temperature of the scores, which scales the betas of tilts.
        has_positives: Whether positives are known, which ``BelowPositive`` needs.
    """
    edges = (0.0, *FRACTIONS)
    inside = tuple(f"Ring({edges[inner]}, {edges[outer]})" for inner, outer in _pairs_of_fractions())
    found = [
        Family("Ring(0.0, outer)", "The narrowest ring around the anchor", tuple(f"Ring(0.0, {f})" for f in FRACTIONS)),
        Family(
            "Ring(inner, outer)", "The ring with the most similar negatives that leaves the closest out", inside, False
        ),
    ]
    for name in ("BelowPositive(relative)", f"BelowPositive(relative) * Rank(0, {TOP})") if has_positives else ():
        texts = tuple(name.replace("relative", f"relative={margin}") for margin in MARGINS)
        found.append(Family(name, "The smallest margin below the positive", texts))
    tilts = tuple(f"Tilt({beta_of(strength, temperature)})" for strength in STRENGTHS)
    return [*found, Family("Tilt", "The largest beta", tilts)]


def beta_of(strength: float, temperature: float) -> float:
    """Return the beta of a tilt with this strength (beta / temperature), to three digits for a readable expression."""
    return float(f"{strength * temperature:.3g}")


@dataclass
class GridSearch:
    """Mean false-negative rate and similarity of every member of every grid.

    Attributes:
        audited: The pairs of the audit.
        wanted: Highest false-negative rate.
        temperature: Temperature of the scores.
        sums: For each family the sums of false-negative rates and similarities, and the number of anchors with
            negatives [3, g].
    """

    audited: AuditedPairs
    wanted: float
    temperature: float
    sums: dict[str, Annotated[Tensor, "3 g"]] = field(default_factory=dict)

    def add(self, chunk: AuditChunk) -> None:
        """Add a chunk of anchors to the sums of all grids."""
        window = SortedRows(chunk)
        for name, start, stop in _windows(window, chunk, self.audited.has_positives):
            self._keep(name, *window.means(start, stop), chunk.known)
        self._keep("Tilt", *_tilted(chunk, self.temperature), chunk.known)

    def _keep(self, name: str, false: Tensor, similarity: Tensor, known: Tensor) -> None:
        """Add the sums over the anchors that have judgements and negatives."""
        some = ~false[known].isnan()
        both = torch.stack([false[known], similarity[known]]).double().nan_to_num(0.0).sum(1)
        found = torch.cat([both, some.double().sum(0, keepdim=True)])
        self.sums[name] = self.sums[name] + found if name in self.sums else found

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Return the mean false-negative rate and the mean similarity of every member of a grid."""
        false, similarity, count = self.sums[name]
        return (false / count).tolist(), (similarity / count).tolist()

    def allowed(self, family: Family) -> list[str]:
        """Return the members whose mean false-negative rate is at most the requested one, the hardest first."""
        members = list(zip(family.texts, *self.curve(family.name), strict=True))
        if not family.ordered:
            members.sort(key=lambda member: -member[2] if not math.isnan(member[2]) else math.inf)
        return [text for text, false, _ in members if false <= self.wanted]


class SortedRows:
    """Candidates of each anchor sorted by score, with cumulative sums of false-negative rates and similarity."""

    def __init__(self, chunk: AuditChunk) -> None:
        scores = chunk.scores
        hidden = scores.candidates.masked_fill(~scores.valid, NEVER)
        self.descending, order = hidden.sort(dim=1, descending=True, stable=True)
        self.count = scores.num_valid()
        self.false = _running((_may_be_false(chunk) & scores.valid).gather(1, order))
        self.similarity = _running(chunk.similarity.masked_fill(~scores.valid, 0.0).gather(1, order))

    def means(self, start: Annotated[Tensor, "b g"], stop: Annotated[Tensor, "b g"]) -> tuple[Tensor, Tensor]:
        """Return mean false-negative rate and similarity [b, g] of ranks start to stop - 1; NaN for empty windows."""
        number = torch.where(stop > start, stop - start, math.nan)
        low, high = start.clamp(max=self.false.shape[1] - 1), stop.clamp(max=self.false.shape[1] - 1)
        false, similarity = (
            (run.gather(1, high) - run.gather(1, low)) / number for run in (self.false, self.similarity)
        )
        return false, similarity


def _may_be_false(chunk: AuditChunk) -> Annotated[Tensor, "b n"]:
    """Return which candidates are false or not judged [b, n]."""
    assert chunk.false is not None
    return chunk.false if chunk.judged is None else chunk.false | ~chunk.judged


def _running(values: Tensor) -> Tensor:
    """Return cumulative sums with a leading 0 [b, n + 1]."""
    total = values.cumsum(1, dtype=torch.float64)
    return torch.cat([total.new_zeros(len(total), 1), total], dim=1)


def _windows(rows: SortedRows, chunk: AuditChunk, has_positives: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the grids that are windows of the sorted rows: name, start and stop [b, g]."""
    scores, count = chunk.scores, rows.count[:, None]
    edges = (
        torch.tensor([0.0, *FRACTIONS], dtype=torch.float64, device=count.device) * count.double() + ROUNDING
    ).long()
    yield "Ring(0.0, outer)", edges[:, :1].expand(-1, len(FRACTIONS)), edges[:, 1:]
    first, second = zip(*_pairs_of_fractions(), strict=True)
    yield "Ring(inner, outer)", edges[:, list(first)], edges[:, list(second)]
    if has_positives:
        lowest = scores.positives.masked_fill(~scores.positive_valid, math.inf).amin(1, keepdim=True)
        margins = torch.tensor(MARGINS, dtype=lowest.dtype, device=lowest.device)
        limit = torch.where(lowest == math.inf, lowest, lowest - margins * lowest.abs())
        start = torch.searchsorted(-rows.descending, -limit.contiguous())
        start = torch.minimum(start, count)
        yield "BelowPositive(relative)", start, count.expand_as(start)
        yield f"BelowPositive(relative) * Rank(0, {TOP})", start, torch.minimum(start + TOP, count)


def _pairs_of_fractions() -> list[tuple[int, int]]:
    """Return positions in (0, *FRACTIONS): every inner edge above 0 with every outer edge beyond it."""
    size = len(FRACTIONS) + 1
    return [(inner, outer) for inner in range(1, size) for outer in range(inner + 1, size)]


def _tilted(chunk: AuditChunk, temperature: float) -> tuple[Tensor, Tensor]:
    """Return E_q of the false-negative rate and similarity [b, g] for every strength of a tilt, the strongest first."""
    valid, scores = chunk.scores.valid, chunk.scores.candidates
    above = (scores - scores.masked_fill(~valid, NEVER).amax(1, keepdim=True)).masked_fill(~valid, NEVER)
    parts = torch.stack([valid.to(scores), (_may_be_false(chunk) & valid).to(scores), chunk.similarity * valid], dim=-1)
    found = []
    for strength in STRENGTHS:
        sums = torch.bmm((beta_of(strength, temperature) * above).exp()[:, None], parts)[:, 0]
        found.append(sums[:, 1:] / sums[:, :1])  # without candidates 0 / 0 = NaN
    both = torch.stack(found, dim=1)
    return both[..., 0], both[..., 1]


def suggestions(
    search: GridSearch, measure: Callable[[list[NamedRule]], list[RuleFigures]]
) -> tuple[list[Suggestion], list[RuleFigures]]:
    """Return the best member of every family, measured as an expression, and the figures of those found.

    Args:
        search: The grids after all chunks were added.
        measure: Measures rules on all sampled anchors.
    """
    found, rows = [], []
    grids = families(search.temperature, search.audited.has_positives)
    allowed = {family: search.allowed(family) for family in grids}
    known = {row.expression: row for row in measure([_rule(texts[0]) for texts in allowed.values() if texts])}
    for family, texts in allowed.items():
        for text in texts[:_tries]:  # rounding may put a member just above the limit; the next one is easier
            row = known.get(repr(parse(text))) or measure([_rule(text)])[0]
            if row.most_false <= search.wanted:
                found.append(_suggestion(family, row, search))
                rows.append(replace(row, kind="suggested"))
                break
        else:
            found.append(_none(family, search))
    return found, rows


def _rule(text: str) -> NamedRule:
    """Parse a suggested expression."""
    return NamedRule(repr(parse(text)), "suggested", parse(text))


def _none(family: Family, search: GridSearch) -> Suggestion:
    """Return a suggestion without an expression and the reason."""
    wanted = f"{100 * search.wanted:.4g} %"
    lowest = min((value for value in search.curve(family.name)[0] if not math.isnan(value)), default=math.nan)
    text = f"None: the least false member of the grid has {100 * lowest:.2f} %, above the limit of {wanted}."
    if search.audited.judges and not search.audited.all_judged:
        text = f"None: too few pairs are judged to know that any member of the grid has at most {wanted}."
    elif lowest <= search.wanted:
        text = f"None: those members of the grid that come closest to the limit of {wanted} lie above it by rounding."
    elif math.isnan(lowest):
        text = "None: no member of the grid leaves an anchor a negative."
    return Suggestion(family.name, None, math.nan, math.nan, math.nan, text, search.temperature)


def _suggestion(family: Family, row: RuleFigures, search: GridSearch) -> Suggestion:
    """Return a suggestion with its reason, and a warning if an easier member is more false."""
    text = f"{family.best} with at most {100 * search.wanted:.4g} % false negatives."
    if family.ordered:
        names = [repr(parse(text)) for text in family.texts]
        place = names.index(row.expression)
        text += " It is the hardest that was tried." if not place else ""
        easier = zip(names[place + 1 :], search.curve(family.name)[0][place + 1 :], strict=True)
        worst = max((one for one in easier if one[1] > search.wanted), key=lambda one: one[1], default=None)
        if worst is not None:
            text += f" The share does not grow steadily here: {worst[0]} is easier and has {100 * worst[1]:.2f} %."
    figures = (row.similarity, row.false_negatives, row.false_negatives_error)
    return Suggestion(family.name, row.expression, *figures, text, search.temperature)
