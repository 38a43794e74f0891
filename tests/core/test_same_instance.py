"""Who is never a negative: the same instance by its id, wherever it is; rows without ids match nothing."""

import pytest
import torch

import hardneg as hn
from support.corner_cases import CLUSTERS, EXAMPLES, LABELS
from support.vectors import make_unit_vectors as vectors


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_same_instance_is_never_its_own_negative(text):
    """Twice in the batch, in the other view, in a shared pool, among private candidates, or the id of a positive."""
    ids = torch.tensor([7, 3, 7, 5, 9])
    shared = hn.Keys(vectors(6, 3, seed=2), torch.tensor([3, 7, 20, 21, 30, 9]), torch.arange(6), torch.arange(6) % 2)
    private = hn.Keys(
        vectors(5, 4, 3, seed=3),
        torch.stack([ids, ids + 40, ids.flip(0), torch.full((5,), 7)], dim=1),
        torch.arange(20).view(5, 4),
        torch.arange(20).view(5, 4) % 2,
    )
    anchors = hn.Keys(vectors(5, 3), ids, LABELS, CLUSTERS)
    positives = hn.Keys(vectors(5, 3, seed=1), torch.tensor([30, 31, 32, 33, 21]))
    tags = {"labels": LABELS, "clusters": CLUSTERS}
    batch = hn.Keys(vectors(5, 3, seed=4), ids, LABELS, CLUSTERS, source="batch")
    for scores in (
        hn.two_views(vectors(5, 3), vectors(5, 3, seed=1), 0.5, ids=ids, extra=[shared, twice(private)], **tags),
        hn.cross_views(vectors(5, 3), vectors(5, 3, seed=1), 0.5, ids=ids, extra=[shared, private], **tags),
        hn.score(anchors, positives, [batch, shared, private], 0.5),
    ):
        log_w = hn.parse(text).log_weights(scores)
        own = scores.anchor_tags.ids[:, None] == scores.candidate_tags.ids
        assert own.sum(-1).min() >= 2
        assert (log_w[own] == hn.NEVER).all()
    of_a_positive = positives.ids[:, None] == scores.candidate_tags.ids
    assert of_a_positive.sum() == 2
    assert (log_w[of_a_positive] == hn.NEVER).all()


def twice(private):
    """Private candidates of both views."""
    both = [torch.cat([part, part]) for part in (private.vectors, private.ids, private.labels, private.clusters)]
    return hn.Keys(*both)


class Remembered:
    """A queue in its shortest form."""

    def __init__(self, keys):
        self._keys = keys

    def keys(self):
        return self._keys


@pytest.mark.parametrize(
    "wrap", [lambda keys: keys, Remembered, lambda keys: keys.vectors], ids=["keys", "object", "tensor"]
)
def test_rows_without_ids_match_nothing_in_a_pool(wrap):
    z1, z2 = vectors(4, 3), vectors(4, 3, seed=1)
    pool = wrap(hn.Keys(vectors(6, 3, seed=2), torch.arange(6)))
    for scores in (
        hn.two_views(z1, z2, 0.5, extra=pool),
        hn.cross_views(z1, z2, 0.5, extra=[pool]),
        hn.score(z1, z2, pool, 0.5),
        hn.score(hn.Keys(z1), hn.Keys(z2), (pool,), 0.5),
        hn.ContrastiveLoss().scores(z1, z2, pool=pool),
    ):
        assert scores.valid[:, -6:].all()
    with_ids = hn.two_views(z1, z2, 0.5, ids=torch.arange(4), extra=pool).valid[:, -6:]
    plain = isinstance(pool, torch.Tensor)
    assert with_ids.sum(-1).tolist() == [6 if plain else 5] * 8


def test_negative_ids_match_nothing():
    keys = hn.Keys(vectors(3, 4), torch.tensor([-1, -1, 5]))
    scores = hn.score(keys, vectors(3, 4, seed=1), keys, 0.5)
    assert scores.valid.tolist() == [[True, True, True], [True, True, True], [True, True, False]]


def test_duplicates_by_id_are_left_out_and_duplicates_by_value_are_hard_negatives():
    z1, z2 = vectors(4, 3), vectors(4, 3, seed=1)
    z1[1], z2[1] = z1[0], z2[0]
    distinct = hn.two_views(z1, z2, 0.05)
    assert distinct.num_valid().tolist() == [6] * 8
    torch.testing.assert_close(distinct.candidates[0, 1].item(), 20.0)
    same = hn.two_views(z1, z2, 0.05, ids=torch.tensor([0, 0, 2, 3]))
    assert same.num_valid().tolist() == [4, 4, 6, 6, 4, 4, 6, 6]
    for q in (hn.Uniform(), hn.Tilt(5.0), hn.Ring(0.0, 0.5)):
        hard, easy = (hn.info_nce(scores, q.log_weights(scores)) for scores in (distinct, same))
        assert torch.isfinite(hard).all()
        assert (hard[[0, 1]] > easy[[0, 1]]).all()
        torch.testing.assert_close(hard[[2, 3]], easy[[2, 3]])


def test_a_negative_id_in_the_batch_is_still_the_row_itself():
    z1, z2 = vectors(4, 3), vectors(4, 3, seed=1)
    pool = hn.Keys(vectors(2, 3, seed=2), torch.tensor([-1, 7]))
    unknown = torch.tensor([-1, -1, 7, -1])
    assert hn.two_views(z1, z2, 0.5, ids=unknown, extra=pool).num_valid().tolist() == [8, 8, 7, 8] * 2
    assert hn.cross_views(z1, z2, 0.5, ids=unknown, extra=pool).num_valid().tolist() == [5, 5, 4, 5]
