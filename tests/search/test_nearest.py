"""The largest of rows and the nearest rows of a corpus: exact, with ties by column and by row."""

from __future__ import annotations

import pytest
import torch

from hardneg.core.types import NEVER
from hardneg.search.nearest import Corpus, nearest
from hardneg.search.topk import top_of_rows

SIZES = ((1000, 3), (1003, 10), (4096, 100), (300, 100), (50, 50), (17, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "size"), SIZES)
def test_the_top_of_rows_is_that_of_a_stable_sort(n: int, size: int, dtype: torch.dtype) -> None:
    """With many equal values, infinite ones and zeros of both signs."""
    scores = (4 * torch.randn(9, n, generator=torch.Generator().manual_seed(n))).round().to(dtype)
    scores[:, ::7], scores[1] = NEVER, -scores[1].abs()
    right = scores.sort(dim=1, descending=True, stable=True)
    values, columns = top_of_rows(scores, size)
    assert torch.equal(values, right.values[:, :size])
    assert torch.equal(columns, right.indices[:, :size])


def test_the_top_of_rows_of_all_magnitudes() -> None:
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 300, generator=random) * 10.0 ** torch.randint(-30, 30, (40, 300), generator=random)
    values, columns = top_of_rows(scores, 20)
    assert torch.equal(values, scores.topk(20).values)
    assert torch.equal(scores.gather(1, columns), values)


def test_nan_comes_first() -> None:
    scores = torch.arange(40.0).repeat(2, 1)
    scores[1, 3] = -torch.nan
    assert top_of_rows(scores, 30)[1][:, 0].tolist() == [39, 3]


def test_nearest_sorts_equal_scores_by_row() -> None:
    corpus = Corpus(torch.ones(50, 2), torch.device("cpu"), block=7)
    values, rows, _ = nearest(corpus, torch.ones(3, 2), 50, (torch.tensor([1]), torch.tensor([4])))
    assert rows[0].tolist() == list(range(50))
    assert rows[1].tolist() == [*range(4), *range(5, 50), -1]
    assert values[1, -1] == NEVER


@pytest.mark.parametrize("size", [4, 19])
def test_nearest_of_many_equal_scores_are_the_first_rows(size: int) -> None:
    """Whatever the blocks are."""
    for block in (7, 20, 1000):
        corpus = Corpus(torch.ones(500, 2), torch.device("cpu"), block)
        excluded = (torch.zeros(400, dtype=torch.long), torch.arange(400))
        _, rows, _ = nearest(corpus, torch.ones(3, 2), size, excluded)
        assert rows.tolist() == [list(range(400, 400 + size)), list(range(size)), list(range(size))]
