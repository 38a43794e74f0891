"""A covering of a grid has every pair of values, or every value, with far fewer points."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from support.grids import covering, grid


@pytest.mark.parametrize(("sizes", "most"), [((6, 3, 3), 18), ((4, 2, 2, 2), 9), ((27, 2, 2), 54), ((3, 4, 5, 2), 24)])
def test_every_pair_of_values_occurs(sizes: tuple[int, ...], most: int) -> None:
    points = covering(sizes, strength=2)
    for one, other in combinations(range(len(sizes)), 2):
        found = {(point[one], point[other]) for point in points}
        assert found == set(product(range(sizes[one]), range(sizes[other])))
    assert len(points) <= most
    assert points == covering(sizes, strength=2)


def test_every_value_occurs_as_often_as_the_others() -> None:
    points = covering((7, 3), strength=1)
    assert sorted(first for first, _ in points) == list(range(7))
    assert sorted([second for _, second in points].count(i) for i in range(3)) == [2, 2, 3]


def test_what_the_covering_does_not_need_is_long() -> None:
    mark = grid("a, b, c", [10, 11], ["x", "y"], [True, False])
    names, cases = mark.args
    assert names == ["a", "b", "c"]
    assert [case.values for case in cases] == list(product([10, 11], ["x", "y"], [True, False]))
    assert [bool(case.marks) for case in cases].count(False) == 4
