"""A batch in chunks has the value, the gradient, the random numbers and the statistics of the batch in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardneg as hn
from hardneg.core.errors import HardnegWarning, forget_warnings
from hardneg.losses import GradCache

ROWS, CHUNK = 64, 8
Loss = Callable[[Tensor], Tensor]


class RowDropout(nn.Module):
    """Dropout whose random numbers are drawn row by row: the same for the whole batch as for its chunks."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 * (torch.rand(x.shape, dtype=torch.float64) < 0.5)


def encoder_with(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), *layers, nn.ReLU(), nn.Linear(16, 6)).double()


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def contrastive(*args: Any, **options: Any) -> Loss:
    ids, labels = torch.arange(ROWS // 2), torch.arange(ROWS // 2) % 5
    loss = hn.ContrastiveLoss(*args, **options)
    return lambda z: loss(*z.chunk(2), ids, labels)


def with_state(loss: nn.Module) -> Loss:
    return lambda z: loss(*nn.functional.normalize(z, dim=-1).chunk(2), ids=torch.arange(ROWS // 2))


LOSSES: dict[str, Callable[[], Loss]] = {
    "dense": lambda: contrastive("Tilt(1.0)", tau_plus=0.05, impl="dense"),
    "streamed": lambda: contrastive("Tilt(1.0)", tau_plus=0.05, impl="streamed"),
    "labels": lambda: contrastive("OtherLabel() * Ring(0.1, 0.8)", positives="label", reduction="pairs"),
    "sogclr": lambda: with_state(hn.SogCLR(ROWS)),
    "emc2": lambda: with_state(hn.EMC2(ROWS)),
}


def step(encoder: nn.Module, encode: Callable[..., Tensor], loss: Loss, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients after 3 * loss, and one random number that is drawn afterwards."""
    torch.manual_seed(2)
    encoder.zero_grad()
    value = 3.0 * loss(encode(x))
    value.backward()
    return value.detach(), [parameter.grad.clone() for parameter in encoder.parameters()] + [torch.rand(1)]


def assert_same_step(encoder: nn.Module, whole: Callable[..., Tensor], name: str, x: Tensor, tolerance: float) -> None:
    expected = step(encoder, whole, LOSSES[name](), x)
    found = step(encoder, GradCache(encoder, CHUNK), LOSSES[name](), x)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert max(gradient.abs().max() for gradient in expected[1][:-1]) > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_chunks_is_that_of_the_whole_batch_with_dropout(name: str) -> None:
    encoder = encoder_with(RowDropout())
    assert_same_step(encoder, encoder, name, batch(), 1e-12)


@pytest.mark.parametrize("rows", [ROWS, ROWS - 4])
def test_gradient_of_chunks_is_that_of_their_graphs_held_together(rows: int) -> None:
    """torch's dropout draws other numbers for chunks than for the whole: here the chunks are those of GradCache."""
    encoder = encoder_with(nn.Dropout(0.3), nn.Dropout(0.3))

    def held(x: Tensor) -> Tensor:
        return torch.cat([encoder(part) for part in x.split(CHUNK)])

    x = batch(rows)
    loss = hn.ContrastiveLoss("Tilt(1.0)")
    expected = step(encoder, held, lambda z: loss(*z.chunk(2)), x)
    found = step(encoder, GradCache(encoder, CHUNK), lambda z: loss(*z.chunk(2)), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_holds_for_both_passes(backward_inside: bool) -> None:
    """Also where autocast still holds the cast weights of the pass without a graph."""
    encoder = encoder_with(nn.Dropout(0.3)).float()
    x, seen = batch().float(), []
    encoder[0].register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))

    def gradients(encode: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(2)
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = encode(x).float().square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return [parameter.grad.clone() for parameter in encoder.parameters()]

    expected = gradients(lambda x: torch.cat([encoder(part) for part in x.split(CHUNK)]))
    found = gradients(GradCache(encoder, CHUNK))
    assert set(seen) == {torch.bfloat16}
    # The chunks' gradients of the weights are added in float32 here, and in bfloat16 there.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected[0].abs().max()))
    assert all(gradient.any() for gradient in found)


def test_no_more_than_a_chunk_is_encoded_at_once_and_each_twice() -> None:
    encoder, sizes = encoder_with(), []
    encoder.register_forward_hook(lambda module, inputs, out: sizes.append((len(inputs[0]), torch.is_grad_enabled())))
    GradCache(encoder, CHUNK)(batch(20)).sum().backward()
    assert sizes == [(8, False), (8, False), (4, False), (8, True), (8, True), (4, True)]
    sizes.clear()
    GradCache(encoder, 20)(batch(20)).sum().backward()
    with torch.no_grad():
        GradCache(encoder, 10)(batch(20))
    assert sizes == [(20, True), (10, False), (10, False)]


def test_batch_statistics_are_of_chunks_updated_once_and_warned_of() -> None:
    def made() -> nn.Sequential:
        return encoder_with(nn.BatchNorm1d(16))

    forget_warnings()
    x, one, two = batch(), made(), made()
    loss = hn.ContrastiveLoss()
    with pytest.warns(HardnegWarning, match="chunks of 8 rows, .* not of the 64 rows"):
        found = step(one, GradCache(one, CHUNK), lambda z: loss(*z.chunk(2)), x)
    expected = step(two, lambda x: torch.cat([two(part) for part in x.split(CHUNK)]), lambda z: loss(*z.chunk(2)), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    assert int(one[1].num_batches_tracked) == ROWS // CHUNK
    assert one[1].track_running_stats
    one.eval()
    torch.testing.assert_close(GradCache(one, CHUNK)(x), one(x))


def test_inputs_may_be_named_and_nested() -> None:
    encoder, x = encoder_with(), batch(12)

    def encode(features: dict[str, Any], scale: Tensor, *, shift: list[Tensor]) -> Tensor:
        assert features["kind"] == "text"
        return encoder(features["x"] * scale + shift[0])

    cache = GradCache(encode, 5, encoder)
    found = cache({"x": x, "kind": "text"}, torch.tensor(2.0), shift=[x.flip(0)])
    torch.testing.assert_close(found, encoder(2.0 * x + x.flip(0)))


def test_wrong_use_raises() -> None:
    encoder, x = encoder_with(), batch()
    with pytest.raises(ValueError, match="GradCache needs a module, got encode=function; pass module="):
        GradCache(lambda x: encoder(x), 4)
    with pytest.raises(ValueError, match="chunk_size of 1 or more"):
        GradCache(encoder, 0)
    with pytest.raises(ValueError, match=r"GradCache needs a whole number, got chunk_size=2\.5"):
        GradCache(encoder, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one entry per row, got sizes=\[3, 64\]"):
        GradCache(encoder, 4)(x, x[:3])
    with pytest.raises(ValueError, match="a vector for each row"):
        GradCache(lambda x: encoder(x).mean(0, keepdim=True), 4, encoder)(x)
    with pytest.raises(ValueError, match="inputs without a gradient of their own"):
        GradCache(encoder, 4)(x.clone().requires_grad_())
