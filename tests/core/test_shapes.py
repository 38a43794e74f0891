"""The shapes written in the signatures are the shapes that come in and go out.

A letter means the same size everywhere in one call. Scores that a function returns have letters of their own: the b of
``two_views`` is the number of instances, and its scores have 2b anchors. So have Keys, whose rows are n for everyone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

import hardneg as hn
from hardneg.core.objectives import debiased
from hardneg.core.types import Guide
from support.vectors import make_unit_vectors

Letters = dict[str, int]
HAS_OWN_LETTERS = (hn.Keys, hn.Scores)


class WrongShapeError(AssertionError):
    pass


def match(shape: Iterable[int], text: str, letters: Letters) -> Letters | None:
    """The letters, with those that this shape adds, or None where it contradicts them.

    ``"b n"``, a size such as ``"b 1"``, one axis with a choice ``"b|1 n"``, or whole shapes to choose from
    ``"n d | b k d"``.
    """
    shape = tuple(shape)
    for option in text.split(" | "):
        axes = option.split()
        if len(axes) != len(shape):
            continue
        found: Letters | None = letters
        for size, axis in zip(shape, axes, strict=True):
            found = None if found is None else _match_axis(size, axis, found)
        if found is not None:
            return found
    return None


def _match_axis(size: int, axis: str, letters: Letters) -> Letters | None:
    for name in axis.split("|"):
        if name.isdigit():
            if size == int(name):
                return letters
        elif letters.get(name, size) == size:
            return {**letters, name: size}
    return None


def check(value: Any, hint: Any, letters: Letters, where: str) -> Letters:
    """Raises WrongShapeError unless every tensor in the value has the shape that its type says."""
    if get_origin(hint) in (Union, types.UnionType):
        return _check_choice(value, get_args(hint), letters, where)
    if get_origin(hint) is Annotated and isinstance(value, Tensor):
        found = match(value.shape, get_args(hint)[1], letters)
        if found is None:
            raise WrongShapeError(f"{where} is {tuple(value.shape)}, not {get_args(hint)[1]!r} with {letters}")
        return found
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        for number, (part, part_hint) in enumerate(zip(value, get_args(hint), strict=True)):
            letters = check(part, part_hint, letters, f"{where}[{number}]")
    if dataclasses.is_dataclass(value) and isinstance(hint, type):
        return check_fields(value, letters, where)
    return letters


def _check_choice(value: Any, hints: tuple[Any, ...], letters: Letters, where: str) -> Letters:
    if isinstance(value, Tensor):
        shaped = [hint for hint in hints if get_origin(hint) is Annotated]
        if not shaped or Tensor in hints:
            return letters
        return check(value, shaped[0], letters, where)
    return check(value, type(value), letters, where) if type(value) in hints else letters


def check_fields(value: Any, letters: Letters, where: str) -> Letters:
    hints = get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        letters = check(getattr(value, field.name), hints[field.name], letters, f"{where}.{field.name}")
    return letters


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the shapes of its arguments and of its result checked against its signature."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        letters: Letters = {}
        if isinstance(getattr(function, "__self__", None), hn.Scores):
            letters = check_fields(function.__self__, letters, "self")  # type: ignore[attr-defined]
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if isinstance(value, int) and not isinstance(value, bool) and len(name) == 1:
                letters = {**letters, name: value}
            own = isinstance(value, hn.Keys)
            after = check(value, hints[name], {} if own else letters, name)
            letters = letters if own else after
        result = function(*args, **kwargs)
        check(result, hints["return"], {} if isinstance(result, HAS_OWN_LETTERS) else letters, "the result")
        return result

    return call


def shaped(function: Callable[..., Any]) -> bool:
    """Whether a signature says a shape, or takes or gives something that does."""
    text = repr(get_type_hints(function, include_extras=True))
    return "Annotated" in text or "Scores" in text


B, D, QUEUE, PRIVATE = 5, 7, 11, 3
Z1, Z2 = make_unit_vectors(B, D, seed=1), make_unit_vectors(B, D, seed=2)
IDS, LABELS, CLUSTERS = torch.arange(B), torch.arange(B) % 2, torch.arange(2 * B).view(B, 2) % 3


def queue() -> hn.Keys:
    labels = torch.arange(QUEUE) % 2
    clusters = torch.stack([labels, labels], dim=1)
    return hn.Keys(make_unit_vectors(QUEUE, D, seed=3), torch.arange(QUEUE), labels, clusters, source="queue")


def private() -> hn.Keys:
    return hn.Keys(make_unit_vectors(B, PRIVATE, D, seed=4), source="mined")


def two_views() -> hn.Scores:
    """10 anchors against 21 candidates, so that a mistaken axis cannot pass for the other."""
    return checked(hn.two_views)(Z1, Z2, 0.5, IDS, LABELS, clusters=CLUSTERS, extra=queue())


def several_positives() -> hn.Scores:
    return hn.core.scoring.same_label_positives(two_views())


CALLS: dict[str, list[Callable[[], Any]]] = {
    "two_views": [two_views, lambda: checked(hn.two_views)(Z1, Z2, 0.5)],
    "cross_views": [
        lambda: checked(hn.cross_views)(Z1, Z2, 0.5),
        lambda: checked(hn.cross_views)(Z1, Z2, torch.tensor(0.5), labels=LABELS, extra=[queue(), private()]),
    ],
    "dense": [lambda: checked(hn.core.scoring.dense)(hn.core.views.pair_views([Z1, Z2], 0.5))],
    "score": [
        lambda: checked(hn.score)(hn.Keys(Z1, IDS), Z2, queue(), 0.5),
        lambda: checked(hn.score)(Z1, hn.Keys(Z2), [queue(), private()], 0.5),
        lambda: checked(hn.score)(
            Z1,
            make_unit_vectors(B, 2, D),
            private(),
            0.5,
            positive_mask=torch.ones(B, 2, dtype=torch.bool),
        ),
    ],
    "from_matrix": [
        lambda: checked(hn.from_matrix)(Z1 @ Z2.T, torch.eye(B, dtype=torch.bool), 0.5),
        lambda: checked(hn.from_matrix)(
            Z1 @ queue().vectors.T,
            torch.zeros(B, QUEUE, dtype=torch.bool),
            valid=torch.ones(B, QUEUE, dtype=torch.bool),
        ),
    ],
    "same_label_positives": [lambda: checked(hn.core.scoring.same_label_positives)(two_views())],
    "more_positives": [lambda: checked(hn.core.scoring.more_positives)(two_views(), two_views().same_label("test"))],
    "matrices": [lambda: checked(hn.core.pairing.matrices)(hn.ContrastiveLoss().pairing(Z1, Z2))],
    "concatenate_scores": [
        lambda: checked(hn.core.scoring.concatenate_scores)(hn.cross_views(Z1, Z2, 0.5), hn.cross_views(Z2, Z1, 0.5))
    ],
    "keep": [lambda: checked(hn.negatives.keep)(two_views(), two_views().valid)],
    "log_expect_exp": [
        lambda: checked(hn.core.objectives.log_expect_exp)(two_views().candidates, weights(two_views()))
    ],
    "info_nce": [
        lambda: objective(hn.info_nce, two_views()),
        lambda: objective(hn.info_nce, several_positives(), tau_plus=0.1),
        lambda: objective(hn.info_nce, several_positives(), positives_in_denominator="all"),
        lambda: objective(hn.info_nce, two_views(), num_negatives="mass"),
    ],
    "jsd": [lambda: objective(hn.jsd, two_views()), lambda: objective(hn.jsd, several_positives(), tau_plus=0.1)],
    "sigmoid": [lambda: objective(hn.sigmoid, several_positives(), bias=-1.0)],
    "surrogate": [
        lambda: objective(hn.surrogate, two_views()),
        lambda: objective(hn.surrogate, several_positives(), log_norm=torch.zeros(2 * B)),
    ],
    "reduce": [
        lambda: checked(hn.reduce)(hn.info_nce(two_views(), weights(two_views())), two_views()),
        lambda: checked(hn.reduce)(torch.ones(2 * B, 1), two_views(), "pairs", weights=torch.ones(2 * B)),
    ],
    "draw": [
        lambda: checked(hn.draw)(weights(two_views()), 4, torch.Generator().manual_seed(0)),
        lambda: checked(hn.draw)(weights(two_views()), 40, torch.Generator().manual_seed(0), "gumbel"),
    ],
    "debiased": [
        lambda: checked(debiased)(torch.zeros(2 * B, 1), several_positives().positives, 0.1, 0.5),
    ],
    "diagnose": [
        lambda: objective(hn.diagnose, two_views()),
        lambda: objective(hn.diagnose, several_positives(), tau_plus=0.1),
    ],
    "assumption_1": [lambda: checked(hn.negatives.assumption_1)(two_views(), hn.Tilt(1.0))],
}


def weights(scores: hn.Scores) -> Tensor:
    return hn.Tilt(1.0).log_weights(scores)


def objective(function: Callable[..., Any], scores: hn.Scores, **options: Any) -> Any:
    return checked(function)(scores, weights(scores), **options)


@pytest.mark.parametrize("name", CALLS)
def test_shapes_of(name: str) -> None:
    for call in CALLS[name]:
        assert call() is not None


def test_every_function_of_the_heart_is_called() -> None:
    heart = ("hardneg.core.scoring", "hardneg.negatives", "hardneg.core.objectives", "hardneg.core.diagnose")
    rooms = (hn, hn.negatives, *(sys.modules[name] for name in heart))
    functions = {
        name: value for room in rooms for name in dir(room) if inspect.isfunction(value := getattr(room, name))
    }
    public = {name: function for name, function in functions.items() if not name.startswith("_")}
    named = {name for name, function in public.items() if function.__module__.startswith(heart) and shaped(function)}
    assert named - set(CALLS) == set()


@pytest.mark.parametrize(
    "name", [name for name, cls in hn.registered_negatives().items() if "hardneg." in cls.__module__]
)
def test_log_weights_of(name: str) -> None:
    cls = hn.registered_negatives()[name]
    for text in cls.examples or [f"{name}()"]:
        log_weights = checked(hn.parse(text).at(0, 1).log_weights)
        assert log_weights(two_views()).shape == (2 * B, 2 * B + QUEUE)


def test_methods_of_scores() -> None:
    scores = two_views()
    guided = scores.guided(two_views())
    assert isinstance(guided.guide, Guide)
    for method, arguments in (
        (scores.narrowed, (torch.ones(1, 2 * B + QUEUE, dtype=torch.bool),)),
        (scores.narrowed, (torch.ones(2 * B, 2 * B + QUEUE, dtype=torch.bool),)),
        (scores.num_valid, ()),
        (scores.other_instance, ()),
        (scores.same_label, ("test",)),
        (scores.same_cluster, ("test",)),
        (scores.of_source, ("test", "batch")),
        (guided.take, (torch.zeros(2 * B, 4, dtype=torch.long),)),
    ):
        assert checked(method)(*arguments) is not None


def test_letters_are_matched() -> None:
    assert match((5, 3), "b n", {}) == {"b": 5, "n": 3}
    assert match((5, 3), "b n", {"b": 5}) == {"b": 5, "n": 3}
    assert match((5, 3), "b n", {"n": 4}) is None
    assert match((5, 3), "b b", {}) is None
    assert match((), "", {"b": 5}) == {"b": 5}
    assert match((5,), "b n", {}) is None
    assert match((5, 1), "b 1", {}) == {"b": 5}
    assert match((5, 2), "b 1", {}) is None
    assert match((1, 3), "b|1 n", {"b": 5}) == {"b": 5, "n": 3}
    assert match((2, 3), "b|1 n", {"b": 5}) is None
    assert match((5, 2, 7), "n d | b k d", {}) == {"b": 5, "k": 2, "d": 7}
    assert match((5, 2, 7), "n d | b k d", {"d": 8}) is None


def test_wrong_arguments_are_caught() -> None:
    scores = two_views()
    with pytest.raises(WrongShapeError, match=r"log_w is \(1, 21\), not 'b n'"):
        checked(hn.info_nce)(scores, weights(scores)[:1])  # broadcasting would hide this
    with pytest.raises(WrongShapeError, match="weights is"):
        checked(hn.reduce)(torch.ones(2 * B, 1), scores, weights=torch.ones(2 * B, 1))
    with pytest.raises(WrongShapeError, match="z2 is"):
        checked(hn.cross_views)(Z1, Z2[:, :3], 0.5)
    with pytest.raises(WrongShapeError, match="labels is"):
        checked(hn.two_views)(Z1, Z2, 0.5, labels=LABELS[:3])
    with pytest.raises(WrongShapeError, match=r"scores\.valid is"):
        checked(hn.jsd)(dataclasses.replace(scores, valid=scores.valid[:, :2]), weights(scores))


def test_wrong_results_are_caught() -> None:
    def transposed(log_w: hn.core.types.LogWeights, k: int) -> Annotated[Tensor, "b k"]:
        return torch.zeros(k, log_w.shape[0])

    def pair(losses: Annotated[Tensor, "b p"]) -> tuple[Annotated[Tensor, "b"], Annotated[Tensor, "b p"]]:
        return losses.sum(1), losses.T

    def unequal(scores: hn.Scores) -> hn.Scores:
        return dataclasses.replace(scores, positives=scores.positives[:2])

    with pytest.raises(WrongShapeError, match=r"the result is \(4, 10\)"):
        checked(transposed)(torch.zeros(2 * B, 2 * B), 4)
    with pytest.raises(WrongShapeError, match=r"the result\[1\] is"):
        checked(pair)(torch.zeros(4, 3))
    with pytest.raises(WrongShapeError, match=r"the result\.candidates is"):
        checked(unequal)(two_views())
