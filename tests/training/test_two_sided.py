"""SogCLR, EMC2 and iSogCLR with two encoders: the losses of ``--denominator`` in clip and pairs, against loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.core.errors import ArgumentError
from hardneg.training.data.inputs import joined
from hardneg.training.loop.method import Batch
from hardneg.training.loop.parts import splits
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes.clip import CLIP
from hardneg.training.recipes.pairs import PairsRecipe
from support.errors import raises
from support.texts import image_text_table, pair_table, vector_file
from support.training_runs import assert_same, everything, interrupted, run

pytest.importorskip("accelerate", reason="training needs the extra train")

IDS = torch.tensor([4, 5, 7, 1, 0, 9])
OTHERS = torch.tensor([2, 5, 11, 1, 8, 9])
T = 0.3
BOTH = {"pairs": {"directions": "both"}, "clip": {}, "clip, images": {}}


def data_for(name: str, folder: Path, **more: Any) -> str:
    if name == "pairs":
        return pair_table(folder / "data.jsonl", num_negatives=0, **more)
    return image_text_table(folder / "data.jsonl") if "images" in name else vector_file(folder / "data.npz")


def options_for(data: str, **options: Any) -> dict[str, Any]:
    return {"data": data, "epochs": 3, "batch_size": 16, "log_every": 1, "dim": 12, "device": "cpu", **options}


def made(name: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    """A method, and a function that makes batches."""
    recipe = name.partition(",")[0]
    wanted = RECIPES[recipe](**options_for(data_for(name, folder), temperature=T, **BOTH[name], **options))
    data = splits(wanted).train.prepared(wanted)
    method = {"pairs": PairsRecipe, "clip": CLIP}[recipe](wanted, data, 10)
    return method, lambda ids: Batch(joined(data.views(ids, 1, 2)), ids, None, data.mined(ids))


def sides(method: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    z = normalize(method.encoder(batch.views), dim=-1).double()
    return z[: len(batch.ids)], z[len(batch.ids) :]


def check(method: Any, batch: Batch, expected: Tensor) -> Tensor:
    """Value to 1e-6 of the loop in float64, and the gradient by every weight."""
    weights = [p for p in method.parameters() if p.requires_grad]
    loss: Tensor = method.loss_of(method.encoder, batch)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    found, wanted = (torch.autograd.grad(one, weights, allow_unused=True) for one in (loss, expected))
    scale = max(float(one.abs().max()) for one in wanted if one is not None)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)
    return loss.detach()


def real(ways: list[Tensor], documents: Tensor) -> Tensor:
    """Both directions in nats, without the positive in the denominator."""
    losses = []
    for s in ways:
        for i in range(len(s)):
            negatives = [s[i, j] for j in range(len(s)) if documents[j] != documents[i]]
            losses.append(torch.stack(negatives).logsumexp(0) - s[i, i])
    return torch.stack(losses).mean().detach()


@pytest.mark.parametrize("name", BOTH)
def test_sogclr_keeps_a_normaliser_of_each_pair_and_direction(name: str, tmp_path: Path) -> None:
    """LibAUC's GCLoss: u_i <- (1 - gamma) u_i + gamma mean_j e^(s_ij - s_ii), and weights e^(s_ij - s_ii) / u_i."""
    method, batch_of = made(name, tmp_path, denominator="sogclr", gamma=0.6)
    u: list[dict[int, float]] = [{}, {}]
    for ids in (IDS, OTHERS, IDS):
        batch = batch_of(ids)
        z1, z2 = sides(method, batch)
        documents, total, s = method.documents[ids], torch.zeros((), dtype=torch.float64), z1 @ z2.T / T
        for way, old in zip((s, s.T), u, strict=True):
            for i, own in enumerate(ids.tolist()):
                relative = [way[i, j] - way[i, i] for j in range(6) if documents[j] != documents[i]]
                g = float(torch.stack(relative).detach().exp().mean())
                old[own] = g if own not in old else 0.4 * old[own] + 0.6 * g
                total = total + sum(one.detach().exp() / old[own] * one for one in relative) / len(relative)
        loss = check(method, batch, T * total / 12)
        torch.testing.assert_close(method.recorded(loss).double(), real([s, s.T], documents), rtol=1e-5, atol=1e-5)


def watching(walk: Any, walks: list[tuple[Any, Any]]) -> Any:
    """Keep the scores and the result of each walk."""

    def watched(scores: Any, *args: Any, **more: Any) -> Any:
        walks.append((scores, walk(scores, *args, **more)))
        return walks[-1][1]

    return watched


@pytest.mark.parametrize("name", BOTH)
def test_emc2_walks_in_each_direction(name: str, tmp_path: Path) -> None:
    """Yau et al. 2024, eq. 6: -s_ii + sum_j (visits of j / visits) s_ij; no visits to pairs of the own document."""
    method, batch_of = made(name, tmp_path, denominator="emc2", burn_in=0.2)
    for ids in (IDS, OTHERS, IDS):
        walks: list[tuple[Any, Any]] = []
        batch = batch_of(ids)
        for one in method.over_data.losses:
            one.chain.walk = watching(type(one.chain).walk.__get__(one.chain), walks)
        loss: Tensor = method.loss_of(method.encoder, batch)
        assert len(walks) == 2
        z1, z2 = sides(method, batch)
        total, s = torch.zeros((), dtype=torch.float64), z1 @ z2.T / T
        for (scores, found), way in zip(walks, (s, s.T), strict=True):
            for i in range(6):
                weights = (found.log_visits[i].double() - found.log_norm[i].double()).exp()
                same = method.documents[scores.candidate_tags.ids.expand(6, -1)[i]] == method.documents[ids[i]]
                assert not bool((weights[same] > 1e-12).any())
                total = total - way[i, i]
                for j in torch.nonzero(weights > 1e-12)[:, 0].tolist():
                    total = total + weights[j] * scores.candidates[i, j].double()
                    if j < 6:
                        torch.testing.assert_close(scores.candidates[i, j].double(), way[i, j], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss.double(), (total / 12).detach(), rtol=1e-6, atol=1e-6)
        documents = method.documents[ids]
        torch.testing.assert_close(method.recorded(loss).double(), real([s, s.T], documents), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_isogclr_learns_a_temperature_of_each_pair_and_direction(name: str, tmp_path: Path) -> None:
    """Qiu et al. 2023, eq. 4: t_i log mean_j e^((s_ij - s_ii) / t_i) + t_i rho."""
    method, batch_of = made(name, tmp_path, denominator="isogclr", rho=0.2)
    with torch.no_grad():
        for one in method.over_data.losses:
            one.temperatures += 0.1 * torch.rand(one.temperatures.shape, generator=torch.Generator().manual_seed(0))
    batch = batch_of(IDS)
    z1, z2 = sides(method, batch)
    documents, similarity, losses = method.documents[IDS], z1 @ z2.T, []
    for way, one in zip((similarity, similarity.T), method.over_data.losses, strict=True):
        for i, own in enumerate(IDS.tolist()):
            t = one.temperatures[own].double()
            relative = torch.stack([way[i, j] - way[i, i] for j in range(6) if documents[j] != documents[i]])
            losses.append(t * ((relative / t).logsumexp(0) - torch.tensor(float(len(relative))).log() + 0.2))
    check(method, batch, torch.stack(losses).mean())


@pytest.mark.parametrize(("name", "denominator"), [("clip", "sogclr"), ("clip", "emc2"), ("pairs", "isogclr")])
def test_a_run_that_is_cut_ends_with_the_same_bits(name: str, denominator: str, tmp_path: Path) -> None:
    options = options_for(data_for(name, tmp_path), denominator=denominator, **BOTH[name])
    run(name, tmp_path / "whole", options)
    with interrupted(7):
        run(name, tmp_path / "cut", options)
    run(name, tmp_path / "cut", options, resume=True)
    assert_same(everything(tmp_path / "whole"), everything(tmp_path / "cut"))
    losses = [record["loss"] for record in Run(tmp_path / "whole").metrics()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("recipe", "options", "what"),
    [
        ("clip", {"denominator": "sogclr", "objective": "sigmoid"}, "--objective to be unset"),
        ("clip", {"denominator": "emc2", "negatives": "Tilt(1.0)"}, "--negatives to be unset"),
        ("clip", {"denominator": "emc2", "tau_plus": 0.1}, "--tau-plus of 0"),
        ("pairs", {"denominator": "isogclr", "temperature": "linear(0.5, 0.1)"}, "a number as --temperature"),
        ("pairs", {"denominator": "sogclr"}, "--directions both"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_training(
    recipe: str, options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with raises(ArgumentError, what=what):
        run(recipe, tmp_path / "run", options_for("embeddings:nowhere.npz", **options))
    assert not (tmp_path / "run").exists()


def test_mined_negatives_are_refused(tmp_path: Path) -> None:
    with raises(ArgumentError, what="pairs without mined negatives"):
        run("pairs", tmp_path / "run", options_for(pair_table(tmp_path / "a.jsonl"), denominator="emc2"))
