"""The order of the tests for several workers, each of which begins with a part of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


def spread(items: list[T], workers: int, file_of: Callable[[T], Hashable], is_first: Callable[[T], bool]) -> list[T]:
    """Puts some files first in the part of each worker, each file in one part; the others stay in their order.

    An idle worker takes over the end of another's part (``--dist worksteal``), and makes the fixtures of a file that
    it takes a half of again. So files with costly ones are at the beginnings.
    """
    first, rest = [item for item in items if is_first(item)], [item for item in items if not is_first(item)]
    ordered: list[T] = []
    for left in range(workers, 0, -1):
        size, number = (len(first) + len(rest)) // left, len(first) // left
        while 0 < number < len(first) and file_of(first[number]) == file_of(first[number - 1]):
            number += 1
        others = max(0, size - number)
        ordered += first[:number] + rest[:others]
        del first[:number], rest[:others]
    return ordered
