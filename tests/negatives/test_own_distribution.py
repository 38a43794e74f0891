"""A distribution in one file of a user's own, with a declared reduction: everywhere without a flag or a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import hardneg as hn
from hardneg.cli.app import app
from hardneg.core.bounds import Bound, Largest
from hardneg.core.tiles import Tile
from hardneg.negatives import Negatives
from hardneg.negatives.base import _registry
from hardneg.testing import check_negatives as assert_conforms


@pytest.fixture(autouse=True)
def own() -> Iterator[type[Negatives]]:
    @dataclass(frozen=True, repr=False)
    class AtLeastBelow(Negatives):
        """Candidates at least ``margin`` below the closest one."""

        margin: float = 0.1

        def bounds(self) -> Mapping[str, Bound]:
            return {"closest": Largest(lambda tile: tile.similarity)}

        def log_weight(self, tile: Tile) -> Tensor:
            return tile.keep(~(tile.similarity > tile.bound["closest"] - self.margin))

    yield AtLeastBelow
    del _registry["AtLeastBelow"]


def views(seed: int = 0) -> tuple[Tensor, Tensor]:
    z = torch.nn.functional.normalize(torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return z[0].double(), z[1].double()


@pytest.mark.parametrize(
    "text",
    [
        "AtLeastBelow()",
        "AtLeastBelow(0.3) * BelowPositive(absolute=-0.5)",
        "BelowPositive(absolute=-0.5) * AtLeastBelow()",
    ],
)
@pytest.mark.filterwarnings("ignore:.*the order matters")
def test_loss_dense_and_streamed(text: str) -> None:
    z1, z2 = views()
    found = []
    for impl in ("dense", "streamed"):
        one = z1.clone().requires_grad_()
        loss = hn.ContrastiveLoss(text, temperature=0.2, impl=impl)(one, z2)
        (2.0 * loss).backward()
        found.append((loss.detach(), one.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
    assert found[0][0] > 0


def test_grammar_and_explain() -> None:
    negatives = hn.parse("OtherLabel() * AtLeastBelow(0.2)")
    assert hn.parse(repr(negatives)) == negatives
    done = CliRunner().invoke(app, ["explain", repr(negatives)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "below the closest one" in done.output


def test_audit() -> None:
    z, labels = views()[0].float(), torch.arange(40) % 4
    row = hn.audit(z, ["AtLeastBelow(0.2)"], labels=labels, frontier=False).rows[0]
    similarity = z @ z.T
    similarity.fill_diagonal_(-torch.inf)
    kept = similarity <= similarity.amax(1, keepdim=True) - 0.2
    kept.fill_diagonal_(False)
    expected = torch.stack([similarity[i][kept[i]].mean() for i in range(40)]).mean()
    assert row.similarity == pytest.approx(float(expected), abs=1e-6)


def test_conformance(own: type[Negatives]) -> None:
    assert_conforms(own())


def test_similarity_is_without_the_temperature() -> None:
    z1, z2 = views()
    z = torch.cat([z1, z2])
    kept = (hn.parse("AtLeastBelow(0.3)").log_weights(hn.two_views(z1, z2, 0.2)) == 0.0).sum(1)
    expected = []
    for i, anchor in enumerate(z):
        negatives = torch.stack([anchor @ other for j, other in enumerate(z) if j not in (i, (i + 40) % 80)])
        expected.append(int((negatives <= negatives.max() - 0.3).sum()))
    assert kept.tolist() == expected
