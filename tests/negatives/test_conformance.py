"""Every registered distribution keeps the rules of hardneg.testing; an error names the rule that one breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import hardneg as hn
from hardneg import testing
from hardneg.core.schedules import Number
from hardneg.core.tiles import Tile
from hardneg.core.types import NEVER, LogWeights, Scores
from hardneg.negatives import keep
from hardneg.negatives.base import _registry
from hardneg.testing import check_negatives as assert_conforms
from hardneg.testing import make_scores, take_columns, take_rows
from support.errors import warns

# The package's own only: other test files may have registered some by now.
OURS = sorted(name for name, cls in hn.registered_negatives().items() if cls.__module__.startswith("hardneg."))
BROKEN: list[tuple[str, str, Callable[[], type[hn.negatives.Negatives]]]] = []


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    before = dict(_registry)
    yield
    _registry.clear()
    _registry.update(before)


@pytest.mark.parametrize("name", OURS)
def test_registered(name: str) -> None:
    assert_conforms(hn.registered_negatives()[name])


@pytest.mark.parametrize(
    "text",
    [
        "Tilt(linear(1.0, 0.0))",
        "Ring(0.1, outer=linear(1.0, 0.1), dynamic_inner=True)",
        "Tilt(5.0, source='mined')",
        "OtherLabel() * Rank(1, 4) * Tilt(2.0, detach=True)",
        "BelowPositive(absolute=0.05, by='guide') * Tilt(1.0)",
        "From('mined') * BelowPositive(absolute=0.1) * Hardening('sigmoid', 3.0)",
    ],
)
def test_instances_and_products(text: str) -> None:
    assert_conforms(hn.parse(text))


def test_what_cannot_be_written_as_text() -> None:
    pairs = hn.negatives.KnownPairs(
        torch.tensor([0, 1, 4]), torch.tensor([20, 2, 26]), torch.tensor([NEVER, 1.5, -2.0])
    )
    assert_conforms(hn.OtherLabel() * hn.Known(pairs))


def test_warned_order_is_no_failure() -> None:
    with warns("order"):
        negatives = hn.Ring(0.1, 0.5) * hn.OtherLabel()
    assert_conforms(negatives, compile=False)


def test_scores_have_all_there_is_to_read() -> None:
    scores = make_scores()
    assert scores.source_names == ("batch", "mined")
    for tags in (scores.anchor_tags, scores.candidate_tags):
        assert tags.ids is not None
        assert tags.labels is not None
        assert tags.clusters is not None
    invalid = (~scores.valid).nonzero().tolist()
    assert invalid == [[0, 0], [1, 1], [2, 2], [3, 3], [3, 8], [4, 4], [5, 5]]
    assert torch.equal(scores.candidates[:, 6], scores.candidates[:, 7])
    assert scores.positive_valid.sum(-1).tolist() == [2, 1, 2, 2, 1, 0]
    assert torch.equal(scores.guide.candidates[:, 6], scores.guide.candidates[:, 7])
    assert make_scores(private=True).candidate_tags.labels.shape == (6, 14)
    assert make_scores(torch.bfloat16).candidates.dtype == torch.float32


def test_take_rows_and_columns() -> None:
    scores = make_scores(private=True)
    some = take_columns(take_rows(scores, torch.tensor([4, 1])), torch.tensor([13, 2]))
    assert torch.equal(some.candidates, scores.candidates[[4, 1]][:, [13, 2]])
    assert some.anchor_tags.labels.tolist() == [2, 0]
    assert some.candidate_tags.labels.tolist() == [[2, 1], [2, 1]]
    assert some.source.tolist() == [1, 0]
    assert torch.equal(some.guide.candidates, scores.guide.candidates[[4, 1]][:, [13, 2]])


def broken(rule: str, message: str) -> Callable[[Callable[[], type]], Callable[[], type]]:
    """A distribution that breaks one rule, defined only when its test runs because defining it registers it."""

    def remember(make: Callable[[], type]) -> Callable[[], type]:
        BROKEN.append((rule, message, make))
        return make

    return remember


def defined_by(
    log_weights: Callable[[Any, Scores], LogWeights], **class_variables: Any
) -> type[hn.negatives.Negatives]:
    body = {"log_weights": log_weights, "__annotations__": dict.fromkeys(class_variables, ClassVar), **class_variables}
    return dataclass(frozen=True, repr=False)(type("Broken", (hn.negatives.Negatives,), body))


@broken("_examples", " cannot be constructed .*; give every field a default, or list expressions")
def field_without_example() -> type:
    @dataclass(frozen=True, repr=False)
    class Broken(hn.negatives.Negatives):
        width: Number

        def log_weights(self, scores: Scores) -> LogWeights:
            return keep(scores, scores.valid)

    return Broken


@broken("reads_back", r" raises .*The check: parse\(repr\(q\)\) == q: use @dataclass")
def not_a_dataclass() -> type:
    class Broken(hn.negatives.Negatives):
        def log_weights(self, scores: Scores) -> LogWeights:
            return keep(scores, scores.valid)

    return Broken


@broken("reads_back", r"is parsed as Broken\(\), which is not equal; leave eq to the dataclass")
def without_equality() -> type:
    @dataclass(frozen=True, repr=False, eq=False)
    class Broken(hn.negatives.Negatives):
        def log_weights(self, scores: Scores) -> LogWeights:
            return keep(scores, scores.valid)

    return Broken


@broken("evaluates_schedules", r"still has schedules; do not override at\(\)")
def keeps_its_schedule() -> type:
    @dataclass(frozen=True, repr=False)
    class Broken(hn.negatives.Negatives):
        beta: Number
        examples: ClassVar = ("Broken(linear(1.0, 0.0))",)

        def log_weights(self, scores: Scores) -> LogWeights:
            return (self.beta * scores.candidates).masked_fill(~scores.valid, NEVER)

        def at(self, step: int, total: int | None = None) -> hn.negatives.Negatives:
            return self

    return Broken


@broken(
    "has_shape_and_dtype", r"returns shape \(1, 14\) for scores \(6, 14\); the tags of shared candidates are \[1, n\]"
)
def one_row_for_all() -> type:
    return defined_by(lambda self, scores: torch.zeros_like(scores.candidate_tags.labels, dtype=torch.float32))


@broken("has_shape_and_dtype", "returns torch.float32 for scores of torch.float64; create tensors with")
def always_float32() -> type:
    return defined_by(lambda self, scores: torch.zeros(scores.valid.shape).masked_fill(~scores.valid, NEVER))


@broken("never_takes_invalid", r"gives weight to invalid candidates; end with .masked_fill\(~scores.valid, NEVER\)")
def forgets_to_mask() -> type:
    return defined_by(lambda self, scores: 1.0 * scores.candidates)


@broken("never_takes_invalid", "gives weight to invalid candidates")
def masks_by_id_only() -> type:
    return defined_by(lambda self, scores: scores.candidates.masked_fill(~scores.other_instance(), NEVER))


@broken("is_a_function", "gives different weights for the same scores; return weights, and let hardneg.draw sample")
def draws_by_itself() -> type:
    return defined_by(lambda self, scores: torch.rand_like(scores.candidates).masked_fill(~scores.valid, NEVER))


@broken("is_a_function", "modifies the scores; use operations without a trailing _")
def works_in_place() -> type:
    return defined_by(lambda self, scores: scores.candidates.masked_fill_(~scores.valid, NEVER))


@broken("has_sound_values", "gives NaN or .inf for finite scores")
def log_of_negative_similarity() -> type:
    return defined_by(lambda self, scores: scores.candidates.log().masked_fill(~scores.valid, NEVER))


@broken("has_sound_values", "has masks = True but weighs the remaining candidates")
def mask_with_weights() -> type:
    return defined_by(lambda self, scores: scores.candidates.masked_fill(~scores.valid, NEVER), masks=True)


@broken("ignores_order_of_anchors", "depends on the order of the anchors; use their tags, not their row numbers")
def by_row_number() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        beta = torch.arange(len(scores.valid), dtype=scores.candidates.dtype)[:, None]
        return (beta * scores.candidates).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken("ignores_order_of_candidates", "depends on the order of the candidates; .* not column numbers")
def by_column_number() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        age = torch.arange(scores.valid.shape[1], dtype=scores.candidates.dtype)
        return age.expand_as(scores.valid).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken("ignores_invalid", "changes when invalid candidates are added; leave them out of means, maxima")
def spread_of_all_candidates() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        spread = scores.candidates.detach().std(-1, keepdim=True)
        return (scores.candidates / spread).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken("survives_empty_row", r"has loss \[nan, nan\] for an anchor without candidates; return NEVER in the whole row")
def normalises_nothing() -> type:
    return defined_by(lambda self, scores: scores.candidates.masked_fill(~scores.valid, NEVER).log_softmax(-1))


@broken("survives_empty_row", "a gradient that is not zero; fill the row with a harmless number")
def root_of_zero() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        size = (scores.candidates * scores.valid).square().sum(-1, keepdim=True).sqrt()
        return (scores.candidates / torch.where(size > 0, size, 1.0)).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken(
    "survives_no_candidates", r"raises IndexError .*The check: Scores \[b, 0\] give loss 0; the maximum of an empty row"
)
def maximum_of_nothing() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        closest = scores.candidates.masked_fill(~scores.valid, NEVER).amax(-1, keepdim=True).detach()
        return (scores.candidates - closest).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken("shows_nan", r"hides NaN in a candidate's score; exclude with ~\(score < limit\), not with score >= limit")
def asks_who_is_inside() -> type:
    return defined_by(lambda self, scores: keep(scores, scores.candidates >= scores.tempered(0.2)))


@broken("agrees_in_low_precision", "differs between float32 and float64 at temperature 0.01 .*; stay in log-space")
def log_of_a_weight() -> type:
    return defined_by(lambda self, scores: scores.candidates.exp().log().masked_fill(~scores.valid, NEVER))


@broken("composes", r"not finite in OtherLabel\(\) \* Broken\(\), where anchors are left with one candidate or none")
def spread_of_one() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        s, count = scores.candidates.detach(), scores.num_valid()[:, None]
        count = torch.where(count == 0, 2, count)
        mean = torch.where(scores.valid, s, 0.0).sum(-1, keepdim=True) / count
        variance = torch.where(scores.valid, s - mean, 0.0).square().sum(-1, keepdim=True) / (count - 1)
        return ((s - mean) / variance.sqrt()).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken("compiles", r"raises .*The check: torch.compile\(fullgraph=True\) works: no .item\(\)")
def looks_at_a_value() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        beta = 1.0 if scores.candidates.sum().item() > 0 else 2.0
        return (beta * scores.candidates).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken("compiles", "has another loss or gradient when compiled; keep no state in log_weights")
def other_when_compiled() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        beta = 2.0 if torch.compiler.is_compiling() else 1.0
        return (beta * scores.candidates).masked_fill(~scores.valid, NEVER)

    return defined_by(log_weights)


@broken("declares_what_it_needs", r"by the other candidates .* write log_weight\(tile\) instead of log_weights")
def below_the_closest_of_whole_rows() -> type:
    def log_weights(self: Any, scores: Scores) -> LogWeights:
        hidden = scores.candidates.masked_fill(~scores.valid, NEVER)
        closest = hidden.amax(-1, keepdim=True) if hidden.shape[1] else hidden.sum(-1, keepdim=True)
        return keep(scores, ~(scores.candidates > closest - scores.tempered(0.1)))

    return defined_by(log_weights)


@broken(
    "works_in_tiles", r"in several tiles; .* def bounds\(self\): return {'closest': Largest\(lambda tile: tile.s\)}"
)
def looks_along_the_tile() -> type:
    @dataclass(frozen=True, repr=False)
    class Broken(hn.negatives.Negatives):
        def log_weight(self, tile: Tile) -> torch.Tensor:
            return tile.keep(~(tile.s > tile.s.amax(-1, keepdim=True) - tile.tempered(0.1)))

    return Broken


@broken("streams", "another loss or gradient when streamed; tensors with a gradient must be fields")
def counts_its_rows() -> type:
    @dataclass(frozen=True, repr=False)
    class Broken(hn.negatives.Negatives):
        def log_weight(self, tile: Tile) -> torch.Tensor:
            return tile.s * (1.0 if len(tile.s) == 6 else 0.5)

    return Broken


@broken(
    "mines_as_whole_rows",
    r"gives other negatives by blocks than from whole rows .* do not override shown\(\) and monotone",
)
def says_that_far_ones_are_removed_with_near_ones() -> type:
    @dataclass(frozen=True, repr=False)
    class Broken(hn.negatives.Negatives):
        masks: ClassVar = True
        monotone: ClassVar = True  # type: ignore[assignment]

        def log_weight(self, tile: Tile) -> torch.Tensor:
            return tile.keep(~(tile.similarity > 0.1))

    return Broken


@pytest.mark.parametrize(("rule", "message", "make"), BROKEN, ids=[make.__name__ for _, _, make in BROKEN])
def test_the_error_says_what_to_fix(rule: str, message: str, make: Callable[[], type[hn.negatives.Negatives]]) -> None:
    with pytest.raises(AssertionError, match=f"(?s)^Broken.*{message}"):
        assert_conforms(make(), compile=rule == "compiles")


def test_every_rule_is_broken_by_one() -> None:
    rules = {rule.__name__ for rule in (*testing.rules_of_text, *testing.rules_of_weights)}
    assert {rule for rule, _, _ in BROKEN} == {*rules, "_examples"}


def test_registry_is_left_as_it_was() -> None:
    assert "Broken" not in hn.registered_negatives()
