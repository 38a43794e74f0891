"""The result of an audit: plain numbers, the same in the table, in the JSON and on the page.

``Audit`` holds one ``RuleFigures`` per rule, the ``Suggestion`` of each family if these were requested, and the
``MinedFindings`` of a mined file. The names of all fields are keys of the JSON.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError
from hardneg.core.text import counted
from hardneg.io.files import run_again, without_nan, write_atomically, write_json
from hardneg.io.outputs import sealed_page
from hardneg.mining.options import TEMPERATURE
from hardneg.negatives import parse


@dataclass(frozen=True)
class Hub:
    """An item that is the negative of many anchors.

    Attributes:
        id: Id, text or row of the item.
        share: Share of all choices that fall on this item.
        times: The share relative to that under a uniform choice.
    """

    id: Any
    share: float
    times: float


@dataclass(frozen=True)
class RuleFigures:
    """The figures of one rule: means over anchors; NaN where undefined, which is null in the JSON."""

    expression: str
    kind: str
    """``"given"``, ``"default"``, ``"suggested"``, ``"mined"`` or ``"judged"``."""
    similarity: float
    """Mean similarity of the negatives under q (the rule's distribution): the hardness."""
    similarity_error: float
    """Standard error of ``similarity`` over the sampled anchors; 0 if all anchors were measured."""
    false_negatives: float
    """Mean share of q on candidates known to be false; NaN if no negative is judged."""
    false_negatives_error: float
    """Standard error of ``false_negatives`` over the sampled anchors."""
    effective_number: float
    """Mean of 1 / sum(q^2): the number of equally weighted negatives that would be as concentrated."""
    near_duplicates: float
    """Mean share of q on near-duplicates of the anchor or of one of its positives."""
    hubness: float
    """Probability that two anchors draw the same negative, relative to a uniform choice: 1 means no hubs."""
    hub_share: float
    """Share of all choices that fall on the 1 % of items chosen most."""
    coverage: float
    """Share of items that some anchor chooses with at least a tenth of the uniform probability."""
    clamped: float
    """Share of pairs whose debiased mean was raised to its lower bound; NaN without positives or if tau_plus is 0."""
    attracted: float
    """Share of the negatives whose gradient pulls them towards the anchor."""
    effective_temperature: float
    """Temperature at which an untilted loss would push as selectively."""
    without_negatives: float
    """Share of anchors that have no negative."""
    hubs: tuple[Hub, ...] = ()
    """The items chosen most often."""
    reads_judge: bool = False
    """Whether the rule itself reads the labels or groups that define false negatives, so that it has none by design."""
    on_frontier: bool = False
    """Whether no other rule has negatives as similar with fewer false ones."""
    judged_share: float = math.nan
    """Mean share of q on candidates that are judged to be false or not; NaN if nothing is judged."""
    bounds: tuple[float, float] | None = None
    """Bounds of ``false_negatives`` of a judged rule, from `hardneg judge`."""

    @property
    def is_rate(self) -> bool:
        """Whether ``false_negatives`` is the rate; if some pairs are not judged it is a lower bound."""
        return self.judged_share > 1.0 - 1e-6

    @property
    def most_false(self) -> float:
        """The share of false negatives if every pair that is not judged were false."""
        known = 0.0 if math.isnan(self.false_negatives) else self.false_negatives
        return known + max(0.0, 1.0 - self.judged_share)


@dataclass(frozen=True)
class Suggestion:
    """The hardest member of a family within the requested false-negative rate, or why there is none."""

    family: str
    expression: str | None
    similarity: float
    false_negatives: float
    false_negatives_error: float
    sentence: str
    """The reason for this choice, or for none."""
    temperature: float = TEMPERATURE
    """The temperature at which the expression was measured, on which the strength of a tilt depends."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that give ``hn.mine`` the same negatives: ``hn.mine(queries, corpus, k=5, **one.options)``."""
        return {"negatives": self.expression, "draw": "gumbel", "temperature": self.temperature}

    @property
    def flags(self) -> str | None:
        """The same arguments for the command line, to paste after ``hardneg mine ...``; None without an expression."""
        if self.expression is None:
            return None
        return f"-n {shlex.quote(self.expression)} --draw gumbel --temperature {self.temperature:g}"


@dataclass(frozen=True)
class Example:
    """A negative in a mined file that is a positive of its query, possibly under another id.

    Attributes:
        query: The query.
        negative: The negative, by the name in the file.
        equals: The positive that it equals.
    """

    query: Any
    negative: Any
    equals: Any


@dataclass(frozen=True)
class Sample:
    """A query of a mined file with a positive and its first negatives, as text where known."""

    query: Any
    positives: tuple[Any, ...]
    negatives: tuple[Any, ...]


@dataclass(frozen=True)
class Counted:
    """A histogram of the similarities of one kind of pairs.

    Attributes:
        counts: Number of pairs in each bin.
        mean: Mean similarity.
    """

    counts: tuple[int, ...]
    mean: float


@dataclass(frozen=True)
class Similarities:
    """Similarities of anchors with positives and candidates, over shared bins; None for kinds without pairs."""

    edges: tuple[float, ...]
    positives: Counted | None
    false: Counted | None
    """Candidates known to be false negatives."""
    negatives: Counted | None
    """All other candidates."""


@dataclass(frozen=True)
class BatchFigures:
    """The pairs that share a batch of a planner; means over all pairs of all batches of an epoch.

    Attributes:
        batches: The planner as given.
        batch_size: Number of items per batch.
        num_batches: Number of batches of the epoch.
        similarity: Mean similarity of two items of a batch.
        uniform_similarity: Mean similarity of two items of the data, which uniform batches have on average.
        false_negatives: Share of the pairs that are known to be false negatives; NaN without labels and groups.
        uniform_false_negatives: The same share of all pairs of the data.
        coverage: Share of the items that are in a batch.
        filled: Share of the places that were filled uniformly because the planner found nothing.
        similarities: Histograms of the similarities of positives (items with their second view), known false negatives
            and other negatives; each pair of items counts once.
    """

    batches: str
    batch_size: int
    num_batches: int
    similarity: float
    uniform_similarity: float
    false_negatives: float
    uniform_false_negatives: float
    coverage: float
    filled: float
    similarities: Similarities


@dataclass(frozen=True)
class MinedFindings:
    """Counts of problems in the lists of a mined file; None where the file does not show them."""

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
    """Negatives that occur twice in the list of their query, by id, text or vector."""
    compared_by: tuple[str, ...]
    """The properties by which documents were compared: ids, texts, vectors."""
    documents: int
    """Number of different negatives."""
    documents_in_corpus: int | None
    """Size of the corpus; None if unknown."""
    hubs: tuple[Hub, ...]
    """The most frequent negatives."""
    examples: tuple[Example, ...] = ()
    """Some negatives that are positives."""
    samples: tuple[Sample, ...] = ()
    """Some lists, to look at."""

    @property
    def coverage(self) -> float:
        """Share of the corpus that is a negative in some list; NaN if the size of the corpus is unknown."""
        return self.documents / self.documents_in_corpus if self.documents_in_corpus else math.nan


@dataclass(frozen=True)
class Audit:
    """How hard and how false the negatives of each rule are.

    ``table`` shows it as text, ``write_html`` as a page, ``to_dict`` and ``write_json`` as data.

    Attributes:
        rows: The figures of each rule: mined, given, default, suggested and judged ones.
        suggestions: One for each family, empty unless ``wanted_false_negatives`` was given.
        num_anchors: Number of anchors measured.
        num_anchors_in_all: Number of anchors that could have been measured.
        num_candidates: Number of candidates that each anchor was compared with.
        num_diagnosed: Number of anchors behind ``attracted`` and ``effective_temperature``, which cost most.
        judges: The data by which false negatives are known: labels, groups, judgements, held-out judgements.
        positives: The origin of the positives, in words.
        temperature: Temperature of tilts and of the loss.
        tau_plus: Share of false negatives that the loss corrects for.
        near_duplicate: Cosine similarity above which items count as near-duplicates.
        wanted_false_negatives: Highest false-negative rate of a suggestion.
        seed: Seed of the sample.
        random_similarity: Mean similarity of an anchor with a uniformly chosen candidate.
        positive_similarity: Mean similarity of an anchor with its positives; NaN without any.
        notes: Remarks about what is unknown or suspicious.
        mined: Problems of the mined lists; None if no lists were given.
        similarities: Histograms of similarities; None if only lists were audited.
        batches: The figures of each planner of batches.
        provenance: Command, versions and input, for audits of files.

    Example:
        >>> import torch, hardneg as hn
        >>> z = torch.eye(4)
        >>> found = hn.audit(z, "Uniform()", labels=torch.tensor([0, 0, 1, 1]), frontier=False)
        >>> found.exact, round(found.row("Uniform()").false_negatives, 3)
        (True, 0.333)
    """

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
    batches: tuple[BatchFigures, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def has_rates(self) -> bool:
        """Whether some rule has a false-negative rate, and not only a lower bound or nothing."""
        return any(row.is_rate for row in self.rows)

    @property
    def exact(self) -> bool:
        """Whether every anchor was measured; otherwise the figures are estimates from a sample."""
        return self.num_anchors == self.num_anchors_in_all

    def row(self, expression: object) -> RuleFigures:
        """Return the figures of a rule.

        Args:
            expression: The distribution, or any text that means the same; ``"mined"`` for mined lists.

        Raises:
            ArgumentError: If the audit has no such rule.
        """
        wanted = str(expression)
        known = {row.expression: row for row in self.rows}
        if wanted not in known:
            with suppress(ArgumentError):  # the name of a row, such as "mined", is not an expression
                wanted = repr(parse(wanted))
        if wanted not in known:
            raise ArgumentError("Audit.row", f"an expression among {list(known)}", f"expression={expression!r}")
        return known[wanted]

    def frontier(self) -> tuple[RuleFigures, ...]:
        """Return the rules that no other rule beats in both hardness and false-negative rate, easiest first."""
        return tuple(sorted((row for row in self.rows if row.on_frontier), key=lambda row: row.similarity))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold; NaN becomes None."""
        fields = {**asdict(self), "exact": self.exact}
        for one, kept in zip(self.suggestions, fields["suggestions"], strict=True):
            kept["flags"] = one.flags
        if self.mined is not None:
            fields["mined"]["coverage"] = self.mined.coverage
        plain: dict[str, Any] = without_nan(fields)
        return plain

    def table(self) -> str:
        """Return the table of the terminal as plain text."""
        from hardneg.auditing.terminal import as_text

        return as_text(self)

    def __repr__(self) -> str:
        """Summarise in one line: number of rules, and of anchors and candidates behind their figures."""
        pairs = f"{counted(self.num_anchors, 'anchor')}, {counted(self.num_candidates, 'candidate')}"
        return f"Audit({counted(len(self.rows), 'rule')}, {pairs})"

    def _repr_html_(self) -> str:
        """Show the rules, the suggestions and the problems of mined lists as tables in notebooks."""
        from hardneg.auditing.terminal import as_html

        return as_html(self)

    def write_html(self, path: str | Path) -> Path:
        """Write one self-contained page and return its path; an existing file is replaced atomically."""
        from hardneg.auditing.page import audit_page

        text = sealed_page(audit_page(self))
        write_atomically(Path(path), lambda stream: stream.write(text.encode()), run_again)
        return Path(path)

    def write_json(self, path: str | Path) -> Path:
        """Write ``to_dict()`` with a checksum and return the path; an existing file is replaced atomically."""
        write_json(Path(path), self.to_dict(), run_again)
        return Path(path)


def with_frontier(rows: Sequence[RuleFigures]) -> tuple[RuleFigures, ...]:
    """Mark the rules on the frontier.

    A rule is on it if no other has negatives at least as similar and at most as false, one of them strictly. Rules
    whose share of false negatives is not a rate, or that read the judging data themselves, neither count nor compete.
    """

    def beaten(place: int, row: RuleFigures) -> bool:
        """Whether another rule is as good or better; of equal rules the first represents all."""
        return any(
            other.similarity >= row.similarity
            and other.false_negatives <= row.false_negatives
            and (other.similarity > row.similarity or other.false_negatives < row.false_negatives or before < place)
            for before, other in enumerate(rows)
            if other.is_rate and not other.reads_judge
        )

    def competes(row: RuleFigures) -> bool:
        """Whether both figures are known and comparable."""
        known = not math.isnan(row.similarity) and not math.isnan(row.false_negatives)
        return known and row.is_rate and not row.reads_judge

    return tuple(replace(row, on_frontier=competes(row) and not beaten(i, row)) for i, row in enumerate(rows))
