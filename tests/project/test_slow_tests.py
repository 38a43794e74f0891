"""The lists of slow and long tests name tests that exist, and workers begin with the files that they name."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from support.ordering import spread

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("marker", ["slow", "long"])
def test_every_entry_is_a_file_or_a_test_and_none_is_named_twice(marker: str) -> None:
    """A renamed test must not turn quick unnoticed."""
    listed = (ROOT / "tests" / f"{marker}.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert sorted(set(listed)) == listed
    for entry in listed:
        file, *names = entry.partition("[")[0].split("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not names or file not in listed, f"{entry} is of a file that is listed as a whole"
        for name in names:
            assert f"def {name}(" in source or f"class {name}:" in source, entry


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_worker_begins_with_whole_files(workers: int) -> None:
    sizes = {"a": 3, "slow1": 5, "b": 4, "slow2": 2, "slow3": 2, "c": 11}
    items = [(file, number) for file, size in sizes.items() for number in range(size)]
    ordered = spread(items, workers, lambda item: item[0], lambda item: item[0].startswith("slow"))
    assert sorted(ordered) == sorted(items)
    left, begun = len(items), 0
    for worker in range(workers):  # as xdist divides them
        number = left // (workers - worker)
        files = [file for file, _ in groupby(ordered[begun : begun + number], key=lambda item: item[0])]
        slow = [file.startswith("slow") for file in files]
        assert slow[0]
        assert slow == sorted(slow, reverse=True)
        left, begun = left - number, begun + number
    together = [file for file, _ in groupby(ordered, key=lambda item: item[0]) if file.startswith("slow")]
    assert len(together) == 3, "no slow file is divided"
