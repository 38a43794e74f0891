"""A batch in chunks has the value, the gradient, the random numbers and the statistics of the batch in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hardneg as hn
from hardneg.core.errors import ArgumentError, DataChanged, forget_warnings
from hardneg.losses import GradCache
from support.errors import raises, warns

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
    with warns("losses.grad_cache", "BatchNorm", "64"):
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
    with raises(ArgumentError, who="GradCache", got="encode=function"):
        GradCache(lambda x: encoder(x), 4)
    with raises(ArgumentError, who="GradCache", what="chunk_size", got="chunk_size=0"):
        GradCache(encoder, 0)
    with raises(ArgumentError, who="GradCache", got="chunk_size=2.5"):
        GradCache(encoder, 2.5)  # type: ignore[arg-type]
    with raises(ArgumentError, who="GradCache", got="sizes=[3, 64]"):
        GradCache(encoder, 4)(x, x[:3])
    with raises(ArgumentError, who="GradCache", got="(1, 6) for slice(0, 4, None)"):
        GradCache(lambda x: encoder(x).mean(0, keepdim=True), 4, encoder)(x)
    with raises(ArgumentError, who="GradCache", got="requires_grad=True"):
        GradCache(encoder, 4)(x.clone().requires_grad_())


class Scaled(nn.Module):
    """An encoder with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder_with()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x) * self.scale


def test_what_is_written_between_the_passes_raises_as_in_torch() -> None:
    scaled = Scaled()
    weights = scaled.encoder[0].weight

    def step_weights(_: Tensor) -> None:
        weights.grad = torch.ones_like(weights)
        torch.optim.SGD([weights], lr=0.1).step()

    def replace_weights(_: Tensor) -> None:
        scaled.encoder[0].weight = nn.Parameter(weights.detach() + 1)

    for name, change in (
        ("inputs", lambda x: x.zero_()),
        ("inputs", lambda x: x[-1].mul_(2.0)),
        ("weights", step_weights),
        ("buffers", lambda _: scaled.scale.mul_(2.0)),
        ("buffers", lambda _: scaled.register_buffer("scale", torch.zeros(()))),
        ("weights", replace_weights),
    ):
        x, scaled.scale = batch(), torch.ones(())
        value = GradCache(scaled, CHUNK)(x).square().sum()
        change(x)
        with pytest.raises(DataChanged) as caught:
            value.backward()
        assert name in caught.value.what


@pytest.mark.parametrize("which", ["weights", "inputs"])
def test_another_tensor_as_data_between_the_passes_raises(which: str) -> None:
    """It counts as no write; torch itself would use the tensors of the forward pass."""
    encoder, x = encoder_with(), batch()
    value = GradCache(encoder, CHUNK)(x).square().sum()
    changed = {"weights": encoder[0].weight, "inputs": x}[which]
    changed.data = changed.detach() + 1
    with pytest.raises(DataChanged) as caught:
        value.backward()
    assert which in caught.value.what


class Wrapped:
    """Rows that are not a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Wrapped:
        return Wrapped(self.x[rows])

    def to(self, device: Any) -> Wrapped:
        return self


def test_overwritten_tensors_inside_of_other_inputs_raise() -> None:
    encoder, rows = encoder_with(), Wrapped(batch())
    value = GradCache(lambda given: encoder(given.x), CHUNK, encoder)(rows).sum()
    rows.x.zero_()
    with pytest.raises(DataChanged):
        value.backward()


def test_a_dict_of_inputs_may_be_filled_anew_before_the_backward_pass() -> None:
    encoder, x = encoder_with(), batch()
    expected = step(encoder, encoder, lambda z: z.square().sum(), x)
    features = {"x": x}

    def encode(_: Tensor) -> Tensor:
        z = GradCache(lambda given: encoder(given["x"]), CHUNK, encoder)(features)
        features["x"] = torch.zeros_like(x)
        return z

    torch.testing.assert_close(step(encoder, encode, lambda z: z.square().sum(), x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_the_forward_pass_holds_in_the_backward_pass(training: bool) -> None:
    encoder = encoder_with(RowDropout(), nn.Dropout(0.5), nn.BatchNorm1d(16))
    encoder.train(training)
    encoder[2].eval()
    encoder[3].eval()

    def gradients(change: bool) -> list[Tensor]:
        torch.manual_seed(2)
        encoder.zero_grad()
        encoder[2].train(training)
        value = GradCache(encoder, CHUNK)(batch()).square().sum()
        if change:
            encoder.train(not training)
        value.backward()
        assert encoder[2].training == (not training if change else training)
        encoder.train(training)
        encoder[3].eval()
        return [parameter.grad.clone() for parameter in encoder.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


def test_buffers_that_the_encoder_writes_itself_may_change() -> None:
    class Counting(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            self.scale += 1
            return self.encoder(x)

    encoder, x = Counting(), batch()
    cache = GradCache(encoder, CHUNK)
    (cache(x).sum() + cache(x.flip(0)).sum()).backward()
    assert encoder.encoder[0].weight.grad is not None


def test_hooks_of_weights_get_the_whole_gradient_once() -> None:
    """Of all chunks and of all calls, as in torch: here one clips, and one is an optimiser in the backward pass."""

    def trained(chunked: bool) -> tuple[list[int], list[Tensor]]:
        encoder, calls = encoder_with(), [0, 0]

        def clip(gradient: Tensor) -> Tensor:
            calls[0] += 1
            return gradient.clamp(-0.5, 0.5)

        def update(weights: Tensor) -> None:
            calls[1] += 1
            with torch.no_grad():
                weights -= 0.1 * weights.grad  # type: ignore[operator]
            weights.grad = None

        for parameter in encoder.parameters():
            parameter.register_hook(clip)
            parameter.register_post_accumulate_grad_hook(update)
        encode = GradCache(encoder, CHUNK) if chunked else encoder
        for _ in range(2):
            (encode(batch()).square().sum() + encode(batch().flip(1)).sum()).backward()
        return calls, [parameter.detach() for parameter in encoder.parameters()]

    found, expected = trained(True), trained(False)
    assert found[0] == expected[0] == [8, 8]
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)


def test_gradients_add_to_those_that_are_there_and_are_given_by_autograd_grad() -> None:
    encoder, x = encoder_with(), batch()
    expected = torch.autograd.grad(encoder(x).square().sum(), [*encoder.parameters()])
    found = torch.autograd.grad(GradCache(encoder, CHUNK)(x).square().sum(), [*encoder.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert encoder[0].weight.grad is None
    for _ in range(2):
        GradCache(encoder, CHUNK)(x).square().sum().backward()
    twice = [parameter.grad for parameter in encoder.parameters()]
    torch.testing.assert_close(twice, [2 * each for each in expected], rtol=1e-12, atol=1e-12)


def test_an_error_in_the_second_pass_leaves_gradients_and_hooks() -> None:
    encoder, x, fired = encoder_with(), batch(), []
    encoder[0].weight.register_post_accumulate_grad_hook(fired.append)
    encoder(x).sum().backward()
    before = encoder[0].weight.grad.clone()
    value = GradCache(encoder, CHUNK)(x).sum()
    x.zero_()
    with pytest.raises(DataChanged):
        value.backward()
    torch.testing.assert_close(encoder[0].weight.grad, before, rtol=0, atol=0)
    encoder(x).sum().backward()
    assert len(fired) == 2
