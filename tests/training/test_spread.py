"""Two ranks encode each half of the rows, and get the features that one process computes, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardneg.training import encoders
from hardneg.training.data.images import ImageData
from hardneg.training.encoders import Represent, build_encoder
from hardneg.training.evaluation.monitors import read_monitor
from hardneg.training.options import RECIPES
from support.two_ranks import on_two_ranks


@pytest.mark.parametrize("number", [1, 37])
def test_features_and_monitors_of_two_ranks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "ROWS", 8)  # five parts, the last one smaller
    options = RECIPES["simclr"](device="cpu")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (number, 1, 8, 8), dtype=torch.uint8, generator=generator)
    data = ImageData(images, torch.arange(number) % 3, torch.arange(number), "some", ("a", "b", "c")).prepared(options)
    encoder = build_encoder("tiny", 1, norm="batch", seed=0)

    def work(rank: int | None) -> list[Any]:
        torch.set_num_threads(1)
        for name, buffer in encoder.named_buffers():
            if rank == 1 and name.endswith("running_mean"):  # statistics that the ranks could not share
                buffer.fill_(7)
        represent = Represent(encoder, epoch=1, seed=0, spread=rank is not None)
        found = [represent.items(data), *represent.views(data)]
        if number > 1:
            found += [torch.tensor(read_monitor(name)(data, represent)) for name in ("knn", "retrieval")]
        return found

    expected = work(None)
    assert not torch.equal(expected[1], expected[2])
    for found in on_two_ranks(work):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
