"""Random numbers as a pure function of what they are for: Philox4x32-10 (Salmon et al. 2011) in torch's integers.

A draw depends on (seed, epoch, id, view) alone, so it is the same for any order of batches, any number of workers or
ranks, and on every device.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: Annotated[Tensor, "4 *"], key: Annotated[Tensor, "2"]) -> Annotated[Tensor, "4 *"]:
    """Four words of 32 bits for each counter of four words and a key of two, all held in int64."""
    first, second, third, fourth = counter.unbind()
    for i in range(_ROUNDS):
        first_key, second_key = ((word + i * step) & _WORD for word, step in zip(key.unbind(), _KEY_STEPS, strict=True))
        high, low = _product(first, _MULTIPLIERS[0])
        other_high, other_low = _product(third, _MULTIPLIERS[1])
        first, second = other_high ^ second ^ first_key, other_low
        third, fourth = high ^ fourth ^ second_key, low
    return torch.stack([first, second, third, fourth])


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and low word of a product. In halves of 16 bits nothing exceeds 2 ** 49: a signed overflow is undefined
    in compiled code. The multiplier is a scalar: as a part of an index it would be narrowed to 32 bits on a GPU."""
    low_half = (word & 0xFFFF) * multiplier
    middle = (word >> 16) * multiplier + (low_half >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_half & 0xFFFF)


def uniforms(
    num: int, ids: Annotated[Tensor, "b"], view: Annotated[Tensor, "b"], epoch: int | Tensor, seed: int | Tensor
) -> Annotated[Tensor, "num b"]:
    """``num`` floats in [0, 1) for each row, of 24 bits: a function of (seed, epoch, id, view) and the slot alone.

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
    # Block by block, so that a slot keeps its numbers when more slots are requested.
    drawn = words.transpose(0, 1).flatten(0, 1)[:num]
    return (drawn >> 8).to(torch.float32) * 2.0**-24


def _scalar(value: int | Tensor, like: Tensor) -> Tensor:
    # A fill and not a copy from the host, which a GPU would wait for.
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64, device=like.device)
