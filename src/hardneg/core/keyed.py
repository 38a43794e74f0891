"""Random numbers as a pure function of their keys: the same in any order, block, process and on any device.

- SplitMix64 (Steele et al. 2014) for pairs, generators and steps: keys (seed, query, item) or (seed, step, stream).
- Philox4x32-10 (Salmon et al. 2011) for augmentations and synthetic negatives: keys (seed, epoch, id, view). Its words
of
  32 bits compile for GPUs, where signed 64-bit products that overflow are undefined.

Do not change either stream: runs resume, and files are mined again, with the numbers of earlier versions.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # SplitMix64's constants, as signed numbers
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def splitmix(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to integers of 64 bits; any shape."""
    x = x + _ODD[0]
    x = (x ^ _shift(x, 30)) * _ODD[1]
    x = (x ^ _shift(x, 27)) * _ODD[2]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift to the right without the sign, which torch's operator keeps."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def generator_at(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """Return a generator for one step of one seed; neighbouring seeds and steps give unrelated numbers.

    Args:
        seed: Seed of the run.
        step: Step or epoch.
        stream: Distinguishes generators of the same step.

    Example:
        >>> generator_at(0, 1).initial_seed() == generator_at(0, 1).initial_seed() != generator_at(1, 0).initial_seed()
        True
    """
    return torch.Generator().manual_seed(_mixed(seed, step, stream))


def uniforms_at(seed: Tensor, step: Tensor, stream: int, shape: tuple[int, ...]) -> Annotated[Tensor, "*"]:
    """Return float64 numbers in [0, 1) for one step of one seed, identical on every device.

    Args:
        seed: Seed, an integer tensor [].
        step: Step, an integer tensor [].
        stream: Distinguishes numbers of the same step.
        shape: Shape of the result.

    Example:
        >>> seed, step = torch.tensor(0), torch.tensor(1)
        >>> numbers = uniforms_at(seed, step, 0, (2, 3))
        >>> numbers.shape, torch.equal(numbers, uniforms_at(seed, step, 1, (2, 3)))
        (torch.Size([2, 3]), False)
    """
    key = splitmix(splitmix(splitmix(seed) ^ step) ^ stream)  # as ``_mixed``
    counter = torch.arange(math.prod(shape), device=seed.device) * _ODD[0] + key
    return _fractions(splitmix(counter)).view(shape)


def _mixed(*parts: int) -> int:
    """Hash some integers to 64 bits, as ``splitmix`` does on tensors."""
    mixed = 0
    for part in parts:
        mixed = ((mixed ^ part) + _ODD[0]) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * _ODD[1] % 2**64
        mixed = (mixed ^ (mixed >> 27)) * _ODD[2] % 2**64
        mixed ^= mixed >> 31
    return mixed


def _fractions(bits: Tensor) -> Tensor:
    """Return the highest 53 bits as a number in [0, 1)."""
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def uniform_of_pairs(
    seed: int, query: Annotated[Tensor, "b"], item: Annotated[Tensor, "b m"]
) -> Annotated[Tensor, "b m"]:
    """Return one float64 number in (0, 1) for each (seed, query, item).

    Args:
        seed: Seed of the draw.
        query: Number of each query, [b].
        item: Number of each item, [b, m].

    Example:
        >>> bool((uniform_of_pairs(0, torch.arange(2), torch.arange(3).expand(2, 3)).diff(dim=0) != 0).all())
        True
    """
    key = splitmix(splitmix(torch.full_like(query, seed)) + query)
    bits = splitmix(splitmix(key[:, None] + item * _ODD[0]))
    return _fractions(bits) + 2.0**-54


def philox(counter: Annotated[Tensor, "4 *"], key: Annotated[Tensor, "2"]) -> Annotated[Tensor, "4 *"]:
    """Compute Philox4x32-10.

    Args:
        counter: Four words of 32 bits per counter, in int64, [4, ...].
        key: Two words of 32 bits, in int64, [2].

    Returns:
        Four random words of 32 bits per counter, in int64, [4, ...].
    """
    first, second, third, fourth = counter.unbind()
    for i in range(_ROUNDS):
        first_key, second_key = ((word + i * step) & _WORD for word, step in zip(key.unbind(), _KEY_STEPS, strict=True))
        high, low = _product(first, _MULTIPLIERS[0])
        other_high, other_low = _product(third, _MULTIPLIERS[1])
        first, second = other_high ^ second ^ first_key, other_low
        third, fourth = high ^ fourth ^ second_key, low
    return torch.stack([first, second, third, fourth])


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of 32-bit words.

    Halves of 16 bits keep every number below 2 ** 49, since signed overflow is undefined in compiled code. The
    multiplier is a Python scalar, because as part of an index expression it would be narrowed to 32 bits on a GPU.
    """
    low_half = (word & 0xFFFF) * multiplier
    middle = (word >> 16) * multiplier + (low_half >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_half & 0xFFFF)


def uniforms(
    num: int, ids: Annotated[Tensor, "b"], view: Annotated[Tensor, "b"], epoch: int | Tensor, seed: int | Tensor
) -> Annotated[Tensor, "num b"]:
    """Return ``num`` float32 numbers in [0, 1) of 24 bits for each row.

    Each number depends on (seed, epoch, id, view) and its slot only, not on the batch.

    Args:
        num: Numbers per row.
        ids: Id of each row, [b].
        view: Number of the view of each row, [b].
        epoch: Epoch or step.
        seed: Seed of the run.

    Returns:
        Numbers [num, b].

    Example:
        >>> ids, view = torch.tensor([7, 8]), torch.tensor([0, 0])
        >>> first = uniforms(3, ids, view, epoch=0, seed=1)
        >>> torch.equal(first.flip(1), uniforms(3, ids.flip(0), view, epoch=0, seed=1))
        True
    """
    num_blocks = -(-num // 4)
    epoch, seed = (_scalar(value, ids) for value in (epoch, seed))
    block = torch.arange(num_blocks, device=ids.device)[:, None]
    counter = (ids & _WORD, (ids >> 32) & _WORD, epoch & _WORD, (view << 16) + block)
    words = philox(
        torch.stack([word.expand(num_blocks, len(ids)) for word in counter]),
        torch.stack([seed & _WORD, (seed >> 32) & _WORD]),
    )
    # In the order of the blocks, so that a slot keeps its numbers when more slots are requested.
    drawn = words.transpose(0, 1).flatten(0, 1)[:num]
    return (drawn >> 8).to(torch.float32) * 2.0**-24


def _scalar(value: int | Tensor, like: Tensor) -> Tensor:
    # torch.full, because copying a number from the host would synchronise with the GPU.
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64, device=like.device)
