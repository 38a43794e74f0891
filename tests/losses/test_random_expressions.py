"""Random expressions and losses by three ways: dense, streamed, and plain loops in float64; values and gradients.

It uses public names only, so that it holds whatever the loss engine becomes. The loops know nothing of the library:
an anchor's weights are exponentials, its masks lists of truth values, its ranks a sort. ``check(SEED)`` repeats a case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import hardneg as hn

CHUNK = 150
pytestmark = pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")  # empty rows are on purpose


@dataclass
class Part:
    """Candidates of one pool, shared [n, d] or private [b, k, d]; tags of the same shape, or None."""

    vectors: Tensor
    ids: Tensor | None
    labels: Tensor | None
    clusters: Tensor | None
    source: str | None
    guide: Tensor | None = None

    def keys(self) -> hn.Keys:
        return hn.Keys(self.vectors, self.ids, self.labels, self.clusters, self.source)


@dataclass
class Case:
    """What is compared, by which expression and objective. ``factors``: names with their arguments.

    ``kind``: "views", all against all; "cross"; "pool"; "score"; "extra", "extra cross", with pools beside the batch.
    """

    kind: str
    views: list[Tensor]
    guides: list[Tensor] | None
    pools: list[Part]
    ids: Tensor | None
    labels: Tensor
    clusters: Tensor
    temperature: Tensor | float
    factors: list[tuple[str, dict[str, Any]]]
    objective: tuple[str, dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    learnt: list[Tensor] = field(default_factory=list)
    several: Part | None = None  # of "score": several positives of each anchor
    mask: Tensor | None = None  # of those, which are real

    def leaves(self) -> list[Tensor]:
        """All that a gradient is taken of."""
        several = [] if self.several is None else [self.several.vectors]
        return [*self.views, *several, *(part.vectors for part in self.pools), *self.learnt]

    @property
    def by_functions(self) -> bool:
        """Whether ContrastiveLoss has no such call."""
        return self.kind in ("extra", "extra cross", "score")

    def __repr__(self) -> str:
        text = " * ".join(f"{name}({', '.join(f'{k}={v}' for k, v in given.items())})" for name, given in self.factors)
        return f"{self.kind} {text} {self.objective} {self.options} temperature={self.temperature}"


# Cases.


def make_case(seed: int) -> Case:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.7 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    kind = random.choice(["views", "views", "cross", "pool", "pool", "extra", "extra cross", "score"])
    b, d = random.randint(2, 7), random.randint(2, 6)
    b = 140 if kind == "views" and random.random() < 0.02 else b  # more than a block of rows
    clusterings = random.choice([(), (1,), (2,)])
    number = random.choice([2, 2, 3, 4]) if kind == "views" else 2
    normalize = random.random() < 0.8
    ids = None if random.random() < 0.4 else whole(3 * b, b) - int(random.random() < 0.3)

    def part(place: int) -> Part:
        many = random.random() < 0.05
        shape = (b, random.randint(1, 4)) if random.random() < 0.3 else (random.randint(2100, 2200) if many else 9,)
        source = random.choice([None, "queue", f"mined{place}"])
        own = None if random.random() < 0.4 else whole(3 * b, *shape) - 1
        return Part(normal(*shape, d), own, whole(3, *shape), whole(3, *shape, *clusterings), source, normal(*shape, d))

    pools = [] if kind in ("views", "cross") else [part(i) for i in range(random.choice([1, 1, 2, 3]))]
    views = [normal(b, d) for _ in range(number)]
    guides = [normal(b, d) for _ in range(number)]
    learnt: list[Tensor] = []
    case = Case(kind, views, guides, pools, ids, whole(3, b), whole(3, b, *clusterings), 0.5, [], ("info_nce", {}))
    case.learnt, case.options = learnt, {"normalize": normalize}
    case.temperature = _temperature(random, b, generator, learnt)
    if kind == "score":
        p = random.randint(1, 3)
        case.several = Part(
            normal(b, p, d), whole(3 * b, b, p) - 1 if random.random() < 0.5 else None, None, None, None
        )
        case.mask = None if random.random() < 0.4 else torch.rand(b, p, generator=generator) < 0.6
    by_guide = not case.by_functions and random.random() < 0.4
    case.guides = guides if by_guide else None
    case.factors = [_factor(random, case, by_guide) for _ in range(random.choice([1, 1, 2, 2, 3, 4]))]
    case.objective = _objective(random, case)
    case.options["reduction"] = random.choice(["anchors", "anchors", "pairs", "none"])
    if not case.by_functions:
        case.options["positives"] = random.choice(["view", "view", "label"])
        case.options["same_label_negatives"] = case.options["positives"] == "label" and random.random() < 0.4
        case.options["detach_keys"] = random.random() < 0.15
    for leaf in case.leaves():
        leaf.requires_grad_()
    return case


def _temperature(random: Random, b: int, generator: torch.Generator, learnt: list[Tensor]) -> float | Tensor:
    kind = random.choice(["number", "number", "learnt", "of each"])
    if kind == "number":
        return random.choice([0.2, 0.5, 1.0])
    shape = () if kind == "learnt" else (b,)
    temperature = 0.3 + 0.7 * torch.rand(shape, generator=generator, dtype=torch.float64)
    learnt.append(temperature)
    return temperature


def _factor(random: Random, case: Case, by_guide: bool) -> tuple[str, dict[str, Any]]:
    sources = [part.source or "pool" for part in case.pools] + ["batch"] * (case.kind not in ("pool", "score"))
    numbered = "batch" in sources or any(part.ids is not None for part in case.pools)
    names = [*MAKERS, *MAKERS, *(["Known"] if case.ids is not None and numbered else [])]
    name = random.choice(names)
    if name == "Known":
        return name, {"seed": random.randint(0, 99)}
    given = MAKERS[name](random, sources)
    if by_guide and name in JUDGES and random.random() < 0.6:
        given["by"] = "guide"
    if name in ("Tilt", "Gaussian") and random.random() < 0.15:
        which = "beta" if name == "Tilt" else "mu"
        given[which] = torch.tensor(given[which], dtype=torch.float64)
        case.learnt.append(given[which])
    return name, given


def _window(random: Random, _: list[str]) -> dict[str, Any]:
    start = random.choice([0, 0, 1, 2])
    return {"start": start, "stop": random.choice([None, start + 1, start + 3, start + 8])}


def _ring(random: Random, _: list[str]) -> dict[str, Any]:
    inner, outer = sorted(random.sample([0.0, 0.1, 0.25, 0.29, 0.5, 0.75, 1.0], 2))
    return {
        "inner": inner,
        "outer": outer,
        "dynamic_inner": random.random() < 0.3,
        "at_least": random.choice([0, 0, 0, 1, 3]),
    }


def _below(random: Random, _: list[str]) -> dict[str, Any]:
    relative, absolute = random.choice([0.0, 0.1, 0.5, -0.5]), random.choice([0.0, 0.2, -0.2])
    return random.choice([{"relative": relative}, {"absolute": absolute}, {"relative": relative, "absolute": absolute}])


def _hardening(random: Random, _: list[str]) -> dict[str, Any]:
    return {"log_eta": random.choice(["exponential", "threshold", "sigmoid"]), "parameter": random.choice([0.5, 1.0])}


Maker = Callable[[Random, list[str]], dict[str, Any]]
MAKERS: dict[str, Maker] = {
    "Uniform": lambda r, _: {},
    "Tilt": lambda r, sources: {
        "beta": r.choice([0.0, 0.5, 1.0, 2.0]),
        "detach": r.random() < 0.3,
        "source": r.choice([None, None, r.choice(sources)]),
    },
    "ClippedTilt": lambda r, _: {
        "beta": r.choice([0.5, 1.0]),
        "bound": r.choice([1.0, 2.0]),
        "detach": r.random() < 0.3,
    },
    "Gaussian": lambda r, _: {"mu": r.choice([0.7, 0.0]), "sigma": r.choice([0.3, 1.0]), "detach": r.random() < 0.3},
    "Threshold": lambda r, _: {"similarity": r.choice([-0.4, 0.0, 0.3, "mean"])},
    "AtMost": lambda r, _: {"similarity": r.choice([-0.2, 0.2, 0.6])},
    "BelowPositive": _below,
    "Hardening": _hardening,
    "OtherLabel": lambda r, _: {},
    "SameCluster": lambda r, _: {},
    "OtherCluster": lambda r, _: {},
    "From": lambda r, sources: {"source": r.choice(sources)},
    "Ring": _ring,
    "Rank": _window,
}
JUDGES = ("Tilt", "ClippedTilt", "Gaussian", "Threshold", "AtMost", "BelowPositive", "Hardening", "Ring", "Rank")


def _objective(random: Random, case: Case) -> tuple[str, dict[str, Any]]:
    name = random.choice(
        ["info_nce"] * 3 + ["jsd", "sigmoid", "surrogate"] + ([] if case.by_functions else ["rince", "isogclr"])
    )
    anchors = len(case.labels) * (len(case.views) if case.kind in ("views", "extra") else 1)
    numbers = 1.0 + torch.arange(anchors, dtype=torch.float64) % 3
    tau_plus = random.choice([0.0, 0.0, 0.05, 0.3, torch.tensor(0.1, dtype=torch.float64)])
    number = random.choice(["support", "support", "candidates", "mass", 5.0, numbers])
    denominator = random.choice(["own", "own", "all", "none"])
    if isinstance(tau_plus, Tensor) and name in ("info_nce", "jsd"):
        case.learnt.append(tau_plus)
    return name, {
        "info_nce": {"tau_plus": tau_plus, "num_negatives": number, "positives_in_denominator": denominator},
        "jsd": {"tau_plus": tau_plus},
        "sigmoid": {"bias": random.choice([0.0, -3.0, 1.0]), "num_negatives": number},
        "surrogate": {},
        "rince": {"q": random.choice([0.1, 0.5, 1.0]), "lam": random.choice([0.01, 0.5])},
        "isogclr": {"rho": random.choice([0.0, 0.3])},
    }[name]


def judged(case: Case, seed: int) -> dict[tuple[int, int], float]:
    """Log-weights of some pairs of ids that are there."""
    random = Random(seed)
    assert case.ids is not None
    there = {int(one) for one in case.ids} | {
        int(i) for part in case.pools if part.ids is not None for i in part.ids.view(-1)
    }
    left, right = (
        sorted({int(one) for one in case.ids if one >= 0}) or [0],
        sorted(one for one in there if one >= 0) or [0],
    )
    return {(random.choice(left), random.choice(right)): random.choice([-math.inf, -1.0, 0.5]) for _ in range(6)}


# By the library.


def expression(case: Case) -> hn.negatives.Negatives:
    """As text wherever text can say it."""
    made = []
    for name, given in case.factors:
        if name == "Known":
            pairs = judged(case, given["seed"])
            anchors, candidates = (torch.tensor(side) for side in zip(*pairs, strict=True))
            values = torch.tensor(list(pairs.values()), dtype=torch.float64)
            made.append(hn.Known(hn.negatives.KnownPairs(anchors, candidates, values)))
        elif any(isinstance(value, Tensor) for value in given.values()):
            made.append(hn.registered_negatives()[name](**given))
        else:
            made.append(hn.parse(f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"))
    product = made[0]
    for factor in made[1:]:
        product = product * factor
    return product


def by_module(case: Case, impl: str) -> Tensor:
    """The loss as a trainer calls it."""
    name, given = case.objective
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    text = ", ".join(f"{key}={value!r}" for key, value in given.items() if key not in tensors)
    of_each = isinstance(case.temperature, Tensor) and case.temperature.ndim == 1
    loss = hn.ContrastiveLoss(
        expression(case),
        0.5 if of_each else case.temperature,
        views={"views": "two"}.get(case.kind, case.kind),
        objective=f"{name}({text})",
        impl=impl,
        **tensors,
        **case.options,
    )
    guide = None if case.guides is None else [*case.guides, *(part.guide for part in case.pools)]
    pool = [part.keys() for part in case.pools] if case.kind == "pool" else None
    first, second = (case.views, None) if len(case.views) > 2 else case.views
    temperature = case.temperature if of_each else None
    return loss(first, second, case.ids, case.labels, pool, case.clusters, temperature=temperature, guide=guide)


def by_functions(case: Case) -> Tensor:
    """The loss by the functions that take scores."""
    views, extra = case.views, [part.keys() for part in case.pools]
    if case.options["normalize"]:
        views = [torch.nn.functional.normalize(view, dim=1) for view in views]
        extra = [hn.Keys(unit(k.vectors), k.ids, k.labels, k.clusters, k.source) for k in extra]
    if case.kind == "extra":  # private candidates of each anchor, of which each view is one
        extra = [
            hn.Keys(k.vectors.repeat(2, 1, 1), twice(k.ids), twice(k.labels), twice(k.clusters), k.source)
            if k.private
            else k
            for k in extra
        ]
    temperature = case.temperature
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature[:, None]
    if case.several is not None:
        vectors = unit(case.several.vectors) if case.options["normalize"] else case.several.vectors
        anchors = hn.Keys(views[0], case.ids, case.labels, case.clusters)
        own = hn.Keys(vectors, case.several.ids)
        scores = hn.score(anchors, own, extra, temperature, positive_mask=case.mask)
    else:
        make: Any = hn.two_views if case.kind == "extra" else hn.cross_views
        scores = make(*views, temperature, case.ids, case.labels, clusters=case.clusters, extra=extra)
    log_w = expression(case).log_weights(scores)
    name, given = case.objective
    return hn.reduce(getattr(hn, name)(scores, log_w, **given), scores, case.options["reduction"])


def twice(tag: Tensor | None) -> Tensor | None:
    return None if tag is None else torch.cat([tag, tag])


# By loops.


@dataclass
class Row:
    """An anchor: scores and plain similarities of its positives and candidates, and who may be its negative."""

    a: Tensor  # [p]
    s: Tensor  # [n]
    t: Tensor
    valid: list[bool]
    others: int  # candidates that are not the anchor's own instance
    label: list[bool]  # of the anchor's label
    cluster: list[bool]  # with a cluster of the anchor's
    sources: list[str]
    known: list[tuple[int, int]]
    guide_a: list[float]
    guide_s: list[float]


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.square().sum(-1, keepdim=True).sqrt()


def rows_of(case: Case) -> list[Row]:
    """Who is compared with whom."""
    several, b = case.kind in ("views", "extra"), len(case.labels)
    prepare: Callable[[Tensor], Tensor] = unit if case.options["normalize"] else lambda vectors: vectors
    views = [prepare(view) for view in case.views]
    keys = [view.detach() if case.options.get("detach_keys") and i else view for i, view in enumerate(views)]
    guides = case.guides and [prepare(view) for view in case.guides]
    pools = [(part, prepare(part.vectors), guides and prepare(part.guide), False) for part in case.pools]
    rows = []
    for v in range(len(views)) if several else [0]:
        for i in range(b):
            against = range(len(views)) if several else [] if case.kind in ("pool", "score") else [1]
            batch = _batch(case, [keys[w] for w in against], guides and [guides[w] for w in against])
            rows.append(_row(case, (keys if several else views)[v][i], guides and guides[v][i], i, [*batch, *pools]))
            row, anchor = rows[-1], (keys if several else views)[v][i]
            if case.several is not None:
                _own_positives(case, row, prepare(case.several.vectors[i]) @ anchor / row.t, i)
                continue
            positives = [w for w in range(len(views)) if w != v]
            row.a = torch.stack([(anchor * keys[w][i]).sum() for w in positives]) / row.t
            row.guide_a = [float((guides[v][i] * guides[w][i]).sum()) for w in positives] if guides else []
    return rows


def _own_positives(case: Case, row: Row, scores: Tensor, i: int) -> None:
    """The real ones of several positives; a candidate with the id of one of them is no negative."""
    assert case.several is not None
    real = [k for k in range(len(scores)) if case.mask is None or case.mask[i, k]]
    row.a = scores[real]
    if case.several.ids is not None:
        ids = {int(case.several.ids[i, k]) for k in real} - {-1}
        row.valid = [valid and pair[1] not in ids for valid, pair in zip(row.valid, row.known, strict=True)]


Candidates = tuple[Part, Tensor, Any, bool]
"""Their tags, their prepared vectors, those of the guide, and whether they are rows of the batch."""


def _batch(case: Case, views: list[Tensor], guides: Any) -> list[Candidates]:
    own = [Part(view, case.ids, case.labels, case.clusters, "batch") for view in views]
    return [(part, part.vectors, guides and guides[w], True) for w, part in enumerate(own)]


def _row(case: Case, anchor: Tensor, guide: Any, i: int, against: Sequence[Candidates]) -> Row:
    own = None if case.ids is None else int(case.ids[i])
    label, clusters = int(case.labels[i]), case.clusters[i].view(-1).tolist()
    temperature = torch.as_tensor(case.temperature, dtype=torch.float64)
    vectors, guides, tags = [], [], []
    for part, prepared, other, of_batch in against:
        at: Any = i if prepared.ndim == 3 else slice(None)
        vectors.append(prepared[at])
        guides.append(other[at] if guide is not None else None)
        ids = None if part.ids is None else part.ids[at].tolist()
        groups = part.clusters[at].reshape(len(prepared[at]), -1).tolist()
        for j, (its_label, its_clusters) in enumerate(zip(part.labels[at].tolist(), groups, strict=True)):
            its = None if ids is None else ids[j]
            same = own is not None and own >= 0 and own == its
            same = same or (of_batch and i == j)  # a row is itself, whatever its id is
            tags.append((same, its, its_label, its_clusters, part.source or "pool"))
    s = (torch.cat(vectors) * anchor).sum(-1)
    t = temperature[i] if temperature.ndim else temperature
    return Row(
        a=s[:0],
        s=s / t,
        t=t,
        valid=[not same for same, *_ in tags],
        others=sum(not same for same, *_ in tags),
        label=[its == label for _, _, its, _, _ in tags],
        cluster=[any(x == y for x, y in zip(clusters, its, strict=True)) for _, _, _, its, _ in tags],
        sources=[source for *_, source in tags],
        known=[(-1 if own is None else own, -1 if its is None else its) for _, its, *_ in tags],
        guide_a=[],
        guide_s=[] if guide is None else (torch.cat(guides) * guide).sum(-1).tolist(),
    )


def promote(rows: list[Row], negatives_too: bool) -> None:
    """Candidates of the anchor's label become positives."""
    for row in rows:
        same = [j for j in range(len(row.valid)) if row.valid[j] and row.label[j]]
        row.a = torch.cat([row.a, row.s[same]])
        row.guide_a = [*row.guide_a, *(row.guide_s[j] for j in same)] if row.guide_s else []
        if not negatives_too:
            row.valid = [valid and not label for valid, label in zip(row.valid, row.label, strict=True)]


def weigh(case: Case, rows: list[Row]) -> list[tuple[list[int], Tensor]]:
    """For each anchor the candidates that are left, and their weights, factor by factor."""
    left = [[j for j, valid in enumerate(row.valid) if valid] for row in rows]
    weights = [torch.ones(len(row.s), dtype=torch.float64) for row in rows]
    for name, given in case.factors:
        given = dict(given)
        by_guide = given.pop("by", "score") == "guide"
        largest = None
        if name == "ClippedTilt":
            found = [_judged(row, by_guide)[js].abs() for row, js in zip(rows, left, strict=True) if js]
            largest = torch.cat(found).max() if found else torch.ones((), dtype=torch.float64)
            given["largest"] = largest
        for r, row in enumerate(rows):
            kept, factor = LOOPS[name](case, row, left[r], by_guide, **given)
            left[r] = kept
            weights[r] = weights[r] * factor
    return [(js, w[js]) for js, w in zip(left, weights, strict=True)]


def _judged(row: Row, by_guide: bool) -> Tensor:
    """Similarity / temperature of one model or the other."""
    return torch.tensor(row.guide_s, dtype=torch.float64) / row.t if by_guide else row.s


def _plain(row: Row, by_guide: bool) -> list[float]:
    return row.guide_s if by_guide else (row.s * row.t).tolist()


Found = tuple[list[int], Any]


def _tilt(case: Case, row: Row, left: list[int], by_guide: bool, beta: Any, detach: bool, source: Any) -> Found:
    s = _judged(row, by_guide)
    tilted = (beta * (s.detach() if detach else s)).exp()
    chosen = torch.tensor([source in (None, one) for one in row.sources])
    return left, torch.where(chosen, tilted, 1.0)


def _clipped(
    case: Case, row: Row, left: list[int], by_guide: bool, beta: float, bound: float, detach: bool, largest: Tensor
) -> Found:
    s = _judged(row, by_guide)
    s, largest = (s.detach(), largest.detach()) if detach else (s, largest)
    mask = torch.zeros(len(s), dtype=torch.bool)
    mask[left] = True
    return left, torch.where(mask, beta * bound * s / largest, 0.0).exp()


def _gaussian(case: Case, row: Row, left: list[int], by_guide: bool, mu: Any, sigma: float, detach: bool) -> Found:
    similarity = _judged(row, by_guide) * row.t
    similarity = similarity.detach() if detach else similarity
    return left, (-((similarity - mu) ** 2) / (2 * sigma**2)).exp()


def _hardened(case: Case, row: Row, left: list[int], by_guide: bool, log_eta: str, parameter: float) -> Found:
    s = _judged(row, by_guide)
    if log_eta == "threshold":
        scores = s.tolist()
        return [j for j in left if math.exp(scores[j]) >= parameter], 1.0
    return left, (parameter * s).exp() if log_eta == "exponential" else 1.0 / (1.0 + (-parameter * s).exp())


def _between(row: Row, left: list[int], by_guide: bool, low: float, high: float) -> Found:
    plain = _plain(row, by_guide)
    return [j for j in left if low <= plain[j] <= high], 1.0


def _thresholded(case: Case, row: Row, left: list[int], by_guide: bool, similarity: float | str) -> Found:
    if similarity != "mean":
        return _between(row, left, by_guide, similarity, math.inf)
    exponentials = [math.exp(each / row.t.item()) for each in _plain(row, by_guide)]
    mean = sum(exponentials[j] for j in left) / max(len(left), 1)
    return [j for j in left if exponentials[j] >= mean], 1.0


def _under(
    case: Case,
    row: Row,
    left: list[int],
    by_guide: bool,
    relative: float | None = None,
    absolute: float | None = None,
) -> Found:
    own = row.guide_a if by_guide else (row.a * row.t).tolist()
    ceiling = math.inf
    if relative is not None and own:
        ceiling = min(own) - relative * abs(min(own))
    if absolute is not None and own:
        ceiling = min(ceiling, min(own) - absolute)
    plain = _plain(row, by_guide)
    return [j for j in left if plain[j] <= ceiling], 1.0


def _ringed(
    case: Case,
    row: Row,
    left: list[int],
    by_guide: bool,
    inner: float,
    outer: float,
    dynamic_inner: bool,
    at_least: int,
) -> Found:
    plain = _plain(row, by_guide)
    order = sorted(left, key=lambda j: -plain[j])
    stop = int(outer * len(order) + 1e-9)
    start = int(inner * (stop if dynamic_inner else len(order)) + 1e-9)
    if at_least:  # it grows outwards, then inwards
        while stop - start < at_least and stop < len(order):
            stop += 1
        while stop - start < at_least and start > 0:
            start -= 1
    return sorted(order[start:stop]), 1.0


def _ranked(case: Case, row: Row, left: list[int], by_guide: bool, start: int, stop: int | None) -> Found:
    plain = _plain(row, by_guide)
    return sorted(sorted(left, key=lambda j: -plain[j])[start:stop]), 1.0


def _known(case: Case, row: Row, left: list[int], by_guide: bool, seed: int) -> Found:
    pairs = judged(case, seed)
    values = [pairs.get(pair, 0.0) for pair in row.known]
    factor = torch.tensor([math.exp(value) for value in values], dtype=torch.float64)
    return [j for j in left if values[j] != -math.inf], factor


LOOPS: dict[str, Callable[..., Found]] = {
    "Uniform": lambda case, row, left, by_guide: (left, 1.0),
    "Tilt": _tilt,
    "ClippedTilt": _clipped,
    "Gaussian": _gaussian,
    "Hardening": _hardened,
    "Threshold": _thresholded,
    "AtMost": lambda case, row, left, by_guide, similarity: _between(row, left, by_guide, -math.inf, similarity),
    "BelowPositive": _under,
    "OtherLabel": lambda case, row, left, by_guide: ([j for j in left if not row.label[j]], 1.0),
    "SameCluster": lambda case, row, left, by_guide: ([j for j in left if row.cluster[j]], 1.0),
    "OtherCluster": lambda case, row, left, by_guide: ([j for j in left if not row.cluster[j]], 1.0),
    "From": lambda case, row, left, by_guide, source: ([j for j in left if row.sources[j] == source], 1.0),
    "Ring": _ringed,
    "Rank": _ranked,
    "Known": _known,
}


def _number(given: Any, counted: dict[str, Any]) -> Any:
    return counted[given] if isinstance(given, str) else given


def _softplus(x: Tensor) -> Tensor:
    return torch.log1p(x.exp())


def _losses(case: Case, row: Row, i: int, s: Tensor, w: Tensor) -> Tensor:
    """The loss of each positive of anchor i, by the formula of the paper; s and w are of the negatives."""
    (name, given), a = case.objective, row.a
    given = {key: value[i] if isinstance(value, Tensor) and value.ndim else value for key, value in given.items()}
    mass = w.sum()
    number = {"support": float(len(s)), "candidates": float(row.others), "mass": mass}
    if name == "info_nce":
        mean = (w * s.exp()).sum() / mass if len(s) else 0.0
        tau = given["tau_plus"]
        if tau and len(s):
            mean = torch.maximum((mean - tau * a.exp()) / (1 - tau), (-1 / row.t).exp())
        many = _number(given["num_negatives"], number) if len(s) else 0.0
        beside = {"own": a.exp(), "all": row.a.exp().sum(), "none": 0.0}[given["positives_in_denominator"]]
        return -(a.exp() / (beside + many * mean)).log()
    q = w / mass
    if name == "jsd":
        tau = given["tau_plus"]
        negative = ((q * _softplus(s)).sum() - tau * _softplus(a)) / (1 - tau)
        return negative + _softplus(-a) - 2 * math.log(2)
    if name == "sigmoid":
        many = _number(given["num_negatives"], number)
        bias = given["bias"]
        return _softplus(-a - bias) + many * (q * _softplus(s + bias)).sum()
    if name == "surrogate":
        return (q.detach() * s).sum() - a
    if name == "rince":
        power, lam = given["q"], given["lam"]
        everything = a.exp() + len(s) * (q * s.exp()).sum()
        return -(power * a).exp() / power + (lam * everything) ** power / power
    assert name == "isogclr"
    return row.t * ((q * s.exp()).sum().log() - a + given["rho"])


def by_loops(case: Case) -> Tensor:
    rows = rows_of(case)
    if case.options.get("positives") == "label":
        promote(rows, case.options["same_label_negatives"])
    without = case.objective[1].get("positives_in_denominator") == "all"  # positives stand against each other
    means, total, pairs = [], torch.zeros((), dtype=torch.float64), 0
    for i, (row, (js, w)) in enumerate(zip(rows, weigh(case, rows), strict=True)):
        losses = _losses(case, row, i, row.s[js], w) if js or without else torch.zeros(len(row.a), dtype=torch.float64)
        means.append(losses.sum() / max(len(losses), 1))
        total, pairs = total + losses.sum(), pairs + len(losses)
    if case.options["reduction"] == "none":
        return torch.stack(means)
    return total / max(pairs, 1) if case.options["reduction"] == "pairs" else torch.stack(means).mean()


# The comparison.


def gradients(loss: Tensor, case: Case) -> list[Tensor]:
    upstream = torch.rand(loss.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = (upstream * loss).sum()
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in case.leaves()]
    return list(torch.autograd.grad(total, case.leaves(), materialize_grads=True))


def differences(seed: int) -> list[str]:
    case = make_case(seed)
    expected = by_loops(case)
    slopes = gradients(expected, case)
    ways = {"functions": lambda: by_functions(case)} if case.by_functions else {}
    if not ways:
        ways = {impl: lambda impl=impl: by_module(case, impl) for impl in ("dense", "streamed", "auto")}
    wrong = []
    for way, compute in ways.items():
        found = compute()
        pairs = [("value", found, expected)]
        pairs += [
            (f"gradient {i}", one, other)
            for i, (one, other) in enumerate(zip(gradients(found, case), slopes, strict=True))
        ]
        for what, one, other in pairs:
            scale = max(1.0, float(other.detach().abs().max()))
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-7, atol=1e-9 * scale):
                gap = float((one - other).detach().abs().max()) if one.shape == other.shape else math.nan
                wrong.append(f"seed {seed}, {way}, {what} by {gap:.1e}: {case!r}")
                break
    return wrong


def check(*seeds: int) -> None:
    wrong = [line for seed in seeds for line in differences(seed)]
    assert not wrong, f"{len(wrong)} of {len(seeds)} cases differ:\n" + "\n".join(wrong[:5])


@pytest.mark.parametrize("chunk", range(4))
def test_dense_streamed_and_loops_agree(chunk: int) -> None:
    check(*range(15 * chunk, 15 * (chunk + 1)))


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(20))
def test_dense_streamed_and_loops_agree_on_3000_cases(chunk: int) -> None:
    check(*range(1000 + chunk * CHUNK, 1000 + (chunk + 1) * CHUNK))
