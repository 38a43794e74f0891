"""The exact search: the same lists for any blocks and any precision of the screen, ties and near ties included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hardneg.core.types import NEVER
from hardneg.search.exact import DocumentBlock, RunningNearest, largest_of_groups, pair_similarity
from hardneg.search.nearest import Corpus, Nearest

Pairs = tuple[Tensor, Tensor]
NONE: Pairs = (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))


SCREENS = ("float32", "bfloat16", "groups")
"""Products in float32, products in bfloat16, and the largest products of groups in bfloat16, as on a GPU."""


def search(
    queries: Tensor, corpus: Tensor, size: int, block: int, excluded: Pairs = NONE, *, screen: str = "float32",
    cosine: bool = False,
) -> Nearest:  # fmt: skip
    rows = Corpus(corpus, corpus.device, block, queries.dtype, cosine)
    running = RunningNearest(rows, queries, size, excluded, largest=largest_of_groups if screen == "groups" else None)
    for low, high in rows.blocks():
        running.add(DocumentBlock.of(rows, low, high, bfloat16=screen != "float32"))
    return running.found()


def brute_force(queries: Tensor, corpus: Tensor, size: int, excluded: Pairs = NONE, cosine: bool = False) -> Nearest:
    """Every pair by itself, then a stable sort."""
    b, n = len(queries), len(corpus)
    place, row = torch.arange(b).repeat_interleave(n), torch.arange(n).repeat(b)
    score = pair_similarity(queries[place], corpus[row], cosine=cosine).view(b, n)
    score[excluded] = NEVER
    key, rows = score.sort(dim=1, descending=True, stable=True)
    key, rows = key[:, :size], rows[:, :size]
    return Nearest(key, rows.masked_fill(key == NEVER, -1), key)


def near_ties(rows: int, dim: int, seed: int) -> Tensor:
    """Few distinct vectors, their copies, and copies that differ by less than the rounding of a product."""
    random = torch.Generator().manual_seed(seed)
    few = torch.nn.functional.normalize(torch.randn(max(rows // 8, 1), dim, generator=random), dim=1)
    chosen = few[torch.randint(0, len(few), (rows,), generator=random)]
    return chosen * (1 + torch.randint(-1, 2, (rows, dim), generator=random) * 2.0**-23)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("dim", [5, 64])
def test_near_ties_are_ordered_as_in_float64(dim: int, cosine: bool, screen: str) -> None:
    queries, corpus = torch.randn(33, dim, generator=torch.Generator().manual_seed(1)), near_ties(700, dim, 2)
    random = torch.Generator().manual_seed(3)
    excluded = torch.arange(33).repeat(2), torch.randint(0, 700, (66,), generator=random)
    right = brute_force(queries, corpus, 9, excluded, cosine)
    plain = (queries @ corpus.T).sort(dim=1, descending=True, stable=True).indices[:, :9]
    assert not torch.equal(plain, brute_force(queries, corpus, 9).rows)  # float32 alone gets it wrong
    for block in (48, 100, 700):
        found = search(queries, corpus, 9, block, excluded, screen=screen, cosine=cosine)
        assert torch.equal(found.rows, right.rows), block
        assert torch.equal(found.key, right.key)


@pytest.mark.parametrize("screen", SCREENS)
def test_adversarial_rounding(screen: str) -> None:
    """The nearest in float64 look farther than hundreds of others once they are rounded to bfloat16."""
    queries = torch.ones(3, 8)
    far = torch.full((400, 8), 1.0 + 2.0**-8 + 2.0**-12)  # rounds up by nearly half a digit
    near = torch.full((20, 8), 1.0 + 2.0**-8 - 2.0**-12) + 0.0  # rounds down, to 1
    near[:, 0] += 0.0078125 * 1.6
    corpus = torch.cat([far, near])
    exact, rounded = corpus.double().sum(1), corpus.bfloat16().double().sum(1)
    assert exact[400:].min() > exact[:400].max()
    assert rounded[400:].max() < rounded[:400].min()
    found = search(queries, corpus, 10, 64, screen=screen)
    assert found.rows.tolist() == [list(range(400, 410))] * 3


def test_low_precision_products_of_torch_change_nothing() -> None:
    queries, corpus = torch.randn(20, 32), torch.randn(300, 32)
    right = brute_force(queries, corpus, 5)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(search(queries, corpus, 5, 64).rows, right.rows)
    finally:
        torch.set_float32_matmul_precision(before)


def test_lists_longer_than_the_corpus_and_rows_left_short() -> None:
    queries, corpus = torch.eye(4)[:2], torch.eye(4)
    excluded = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 3])
    for screen in SCREENS:
        found = search(queries, corpus, 9, 3, excluded, screen=screen)
        assert found.rows.tolist() == [[3, -1, -1, -1], [1, 0, 2, -1]]
        assert found.key[0].tolist() == [0.0, NEVER, NEVER, NEVER]


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 64, 385])
def test_a_pair_does_not_depend_on_its_neighbours(dim: int) -> None:
    first, second = torch.randn(50, dim), torch.randn(50, dim)
    for cosine in (False, True):
        whole = pair_similarity(first, second, cosine=cosine)
        alone = torch.cat([pair_similarity(first[i : i + 1], second[i : i + 1], cosine=cosine) for i in range(50)])
        assert torch.equal(whole, alone)
        wide = first.double(), second.double()
        right = torch.cosine_similarity(*wide, dim=1) if cosine else (wide[0] * wide[1]).sum(1)
        torch.testing.assert_close(whole, right, rtol=1e-13, atol=1e-13)


def test_equal_scores_come_by_row_in_any_blocks() -> None:
    excluded = (torch.zeros(400, dtype=torch.long), torch.arange(400))
    for block in (7, 20, 1000):
        found = search(torch.ones(2, 2), torch.ones(500, 2), 19, block, excluded)
        assert found.rows.tolist() == [list(range(400, 419)), list(range(19))]


@pytest.mark.parametrize("screen", SCREENS)
def test_the_nearest_may_all_lie_in_one_group(screen: str) -> None:
    """The screen bounds the last of a list by the largest of groups of columns, and of groups of these."""
    random = torch.Generator().manual_seed(0)
    queries, corpus = torch.randn(4, 16, generator=random), torch.randn(8192, 16, generator=random)
    corpus[5::512] = 3 * queries[:1] + 0.01 * torch.randn(16, 16, generator=random)  # every 512th column
    corpus[7::32] = 2 * queries[1:2] + 0.01 * torch.randn(256, 16, generator=random)
    found, right = search(queries, corpus, 2, 8192, screen=screen), brute_force(queries, corpus, 2)
    assert torch.equal(found.rows, right.rows)
    assert set(found.rows[0].tolist()) <= set(range(5, 8192, 512))


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("scale", [1.0, 1e-37, 1e-39])
def test_vectors_too_close_or_too_small_to_screen_in_bfloat16(scale: float, screen: str) -> None:
    """Hundreds of candidates differ by less than the rounding, and processors take tiny bfloat16 numbers as zero."""
    random = torch.Generator().manual_seed(0)
    queries, corpus = torch.randn(9, 8, generator=random) * scale, 1 + 1e-4 * torch.randn(900, 8, generator=random)
    found, right = search(queries, corpus * 2.0**40, 4, 300, screen=screen), brute_force(queries, corpus * 2.0**40, 4)
    assert torch.equal(found.rows, right.rows)
    assert torch.equal(found.key, right.key)
