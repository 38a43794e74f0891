"""What an audit found: plain numbers, the same in the table, in the JSON and on the page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError
from hardneg.io.files import run_again, without_nan, write_atomically, write_json
from hardneg.io.outputs import sealed_page
from hardneg.mining.options import TEMPERATURE
from hardneg.negatives import parse


@dataclass(frozen=True)
class Hub:
    """An item that is the negative of many anchors; ``times`` is how much more often than under an even choice."""

    id: Any
    share: float
    times: float


@dataclass(frozen=True)
class RuleFigures:
    """One rule. Means over anchors; NaN where a question has no answer, which is null in the JSON."""

    expression: str
    kind: str  # "given", "default", "suggested" or "mined"
    similarity: float
    """Mean plain similarity of the negatives under q, and its standard error over the anchors looked at."""
    similarity_error: float
    false_negatives: float
    """Mean share of q on candidates known to be false, and its standard error; NaN where no negative is judged."""
    false_negatives_error: float
    effective_number: float
    near_duplicates: float
    """Mean share of q on candidates that are near-duplicates of the anchor or of one of its positives."""
    hubness: float
    """How many times as often two anchors draw the same negative as under an even choice: 1 is even."""
    hub_share: float
    """Share of all choices that falls on the 1% of items chosen most."""
    coverage: float
    """Share of items that some anchor chooses at least a tenth as often as an even choice would."""
    clamped: float
    """Share of pairs whose debiased mean was floored; NaN without positives or with tau_plus 0."""
    attracted: float
    effective_temperature: float
    without_negatives: float
    """Share of anchors that have no negative."""
    hubs: tuple[Hub, ...] = ()
    reads_judge: bool = False
    """Whether the rule itself reads the labels or groups that false negatives are known by: it has none by design."""
    on_frontier: bool = False
    """Whether no other rule has negatives as similar with fewer false ones; rules that read the judge are excluded."""
    judged_share: float = math.nan
    """Mean share of q on candidates of which a judge says whether they are false; NaN without a judge."""

    @property
    def is_rate(self) -> bool:
        """Whether ``false_negatives`` is the rate; otherwise it is a lower bound, since some pairs are not judged."""
        return self.judged_share > 1.0 - 1e-6

    @property
    def most_false(self) -> float:
        """The share if all that is not judged were false."""
        known = 0.0 if math.isnan(self.false_negatives) else self.false_negatives
        return known + max(0.0, 1.0 - self.judged_share)


@dataclass(frozen=True)
class Suggestion:
    """The hardest member of a family that stays at or below the wanted share of false negatives, or why none does."""

    family: str
    expression: str | None
    similarity: float
    false_negatives: float
    false_negatives_error: float
    sentence: str
    """What was found, in words."""
    temperature: float = TEMPERATURE
    """The temperature that the expression was measured at: a tilt means something at a temperature only."""

    @property
    def options(self) -> dict[str, Any]:
        """What gives ``hn.mine`` the same negatives: ``hn.mine(queries, corpus, positives, k=5, **one.options)``."""
        return {"negatives": self.expression, "draw": "gumbel", "temperature": self.temperature}

    @property
    def flags(self) -> str | None:
        """The same for the command line, to be pasted after ``hardneg mine ...``."""
        if self.expression is None:
            return None
        return f"-n {shlex.quote(self.expression)} --draw gumbel --temperature {self.temperature:g}"


@dataclass(frozen=True)
class Example:
    """One finding in a mined file: which query, which document, and what it equals."""

    query: Any
    negative: Any
    equals: Any


@dataclass(frozen=True)
class Sample:
    """A query of a mined file with a positive and its first negatives, as texts where they are known."""

    query: Any
    positives: tuple[Any, ...]
    negatives: tuple[Any, ...]


@dataclass(frozen=True)
class Counted:
    """How many pairs fall into each bin, and their mean similarity."""

    counts: tuple[int, ...]
    mean: float


@dataclass(frozen=True)
class Similarities:
    """Similarities of anchors with positives and with candidates, over shared edges; None where there are none."""

    edges: tuple[float, ...]
    positives: Counted | None
    false: Counted | None
    """Candidates that are known to be false."""
    negatives: Counted | None
    """All other candidates."""


@dataclass(frozen=True)
class MinedFindings:
    """What is wrong, or not, with the lists of a mined file; None where the file does not say."""

    queries: int
    negatives: int
    wanted: int | None
    short: int
    """Queries with fewer negatives than wanted (without a manifest: than the longest list)."""
    queries_without: int | None
    """Queries of the mining job that have no negative at all."""
    equal_to_positive: int
    """Negatives that are a positive of their query, under the same id."""
    positive_under_another_id: int
    """Negatives with the same text or vector as a positive of their query, under another id."""
    repeated: int
    """Negatives that are twice in the list of their query, by id, text or vector."""
    compared_by: tuple[str, ...]
    documents: int
    documents_in_corpus: int | None
    hubs: tuple[Hub, ...]
    examples: tuple[Example, ...] = ()
    samples: tuple[Sample, ...] = ()

    @property
    def coverage(self) -> float:
        return self.documents / self.documents_in_corpus if self.documents_in_corpus else math.nan


@dataclass(frozen=True)
class Audit:
    """How hard and how false the negatives of each rule are; ``to_dict``, ``table`` and ``write_html`` show it."""

    rows: tuple[RuleFigures, ...]
    suggestions: tuple[Suggestion, ...]
    num_anchors: int
    num_anchors_in_all: int
    num_candidates: int
    num_diagnosed: int
    judges: tuple[str, ...]
    positives: str
    temperature: float
    tau_plus: float
    near_duplicate: float
    wanted_false_negatives: float | None
    seed: int
    random_similarity: float
    positive_similarity: float
    notes: tuple[str, ...] = ()
    mined: MinedFindings | None = None
    similarities: Similarities | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def has_rates(self) -> bool:
        """Whether the share of false negatives of some rule is a rate, and not a lower bound or unknown."""
        return any(row.is_rate for row in self.rows)

    @property
    def exact(self) -> bool:
        """Whether every anchor was looked at; if not, figures are estimates from a sample."""
        return self.num_anchors == self.num_anchors_in_all

    def row(self, expression: object) -> RuleFigures:
        """The row of an expression, given as a distribution or as any text that means the same."""
        wanted = str(expression)
        known = {row.expression: row for row in self.rows}
        if wanted not in known:
            with suppress(ArgumentError):  # the name of a row, such as "mined", is no expression
                wanted = repr(parse(wanted))
        if wanted not in known:
            raise ArgumentError("Audit.row", f"an expression among {list(known)}", f"expression={expression!r}")
        return known[wanted]

    def frontier(self) -> tuple[RuleFigures, ...]:
        """The rules that no other beats in both similarity and falseness, from the easiest to the hardest."""
        return tuple(sorted((row for row in self.rows if row.on_frontier), key=lambda row: row.similarity))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        fields = {**asdict(self), "exact": self.exact}
        for one, kept in zip(self.suggestions, fields["suggestions"], strict=True):
            kept["flags"] = one.flags
        if self.mined is not None:
            fields["mined"]["coverage"] = self.mined.coverage
        plain: dict[str, Any] = without_nan(fields)
        return plain

    def table(self) -> str:
        """The table of the terminal as plain text."""
        from hardneg.auditing.terminal import as_text

        return as_text(self)

    def write_html(self, path: str | Path) -> Path:
        """One self-contained page; replaced as a whole or not at all."""
        from hardneg.auditing.page import audit_page

        text = sealed_page(audit_page(self))
        write_atomically(Path(path), lambda stream: stream.write(text.encode()), run_again)
        return Path(path)

    def write_json(self, path: str | Path) -> Path:
        write_json(Path(path), self.to_dict(), run_again)
        return Path(path)


def with_frontier(rows: Sequence[RuleFigures]) -> tuple[RuleFigures, ...]:
    """Marks the rules that no other beats: none has negatives at least as similar, at most as false, and one better."""

    def beaten(place: int, row: RuleFigures) -> bool:
        """Of rules that do the same, the first one stands for all."""
        return any(
            other.similarity >= row.similarity
            and other.false_negatives <= row.false_negatives
            and (other.similarity > row.similarity or other.false_negatives < row.false_negatives or before < place)
            for before, other in enumerate(rows)
            if other.is_rate and not other.reads_judge
        )

    def placed(row: RuleFigures) -> bool:
        known = not math.isnan(row.similarity) and not math.isnan(row.false_negatives)
        return known and row.is_rate and not row.reads_judge

    return tuple(replace(row, on_frontier=placed(row) and not beaten(i, row)) for i, row in enumerate(rows))
