"""Random numbers by key: known answers, uniform, independent."""

from __future__ import annotations

import math

import pytest
import torch

from hardneg.core.keyed import philox, uniforms

WORD = 0xFFFFFFFF


class TestPhilox:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
            ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
            (
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
            ),
        ],
    )
    def test_known_answers_of_random123(self, counter: list[int], key: list[int], expected: list[int]) -> None:
        assert philox(torch.tensor(counter)[:, None], torch.tensor(key))[:, 0].tolist() == expected

    def test_agrees_with_plain_integers(self) -> None:
        counters = torch.randint(0, WORD, (4, 50))
        key = torch.randint(0, WORD, (2,))
        drawn = philox(counters, key)
        for i in range(50):
            assert drawn[:, i].tolist() == plain_philox(counters[:, i].tolist(), key.tolist())

    def test_uniforms_are_uniform_in_every_slot(self) -> None:
        n, bins = 20_000, 50
        u = uniforms(32, torch.arange(n), torch.zeros(n, dtype=torch.int64), 0, 0)
        assert ((u >= 0) & (u < 1)).all()
        counts = torch.stack([torch.histc(row, bins, 0, 1) for row in u])
        chi_squared = ((counts - n / bins) ** 2 / (n / bins)).sum(1)
        # 49 degrees of freedom: above 95 once in 10,000; 32 slots at once stay below it but for 1 in 300.
        assert chi_squared.max() < 95
        assert chi_squared.mean() == pytest.approx(49, abs=4 * math.sqrt(2 * 49 / 32))

    @pytest.mark.parametrize("what", ["slot", "id", "view", "epoch", "seed"])
    def test_neighbours_are_independent(self, what: str) -> None:
        """Pairs that differ by one in one part of the counter fill the unit square evenly."""
        n, bins = 40_000, 16
        ids, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
        first, second = {
            "slot": uniforms(2, ids, zero, 0, 0),
            "id": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids + 1, zero, 0, 0)[0]]),
            "view": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids, zero + 1, 0, 0)[0]]),
            "epoch": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids, zero, 1, 0)[0]]),
            "seed": torch.stack([uniforms(1, ids, zero, 0, 0)[0], uniforms(1, ids, zero, 0, 1)[0]]),
        }[what]
        cell = (first * bins).long() * bins + (second * bins).long()
        expected = n / bins**2
        chi_squared = ((cell.bincount(minlength=bins**2) - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 255) < 4 * math.sqrt(2 * 255)
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / math.sqrt(n)

    def test_no_part_of_the_key_is_ignored(self) -> None:
        zero = torch.zeros(1, dtype=torch.int64)
        cases = [
            (0, 0, 0, 0),
            (1 << 40, 0, 0, 0),
            (-1, 0, 0, 0),
            (0, 1, 0, 0),
            (0, 0, 1, 0),
            (0, 0, 0, 1),
            (0, 0, 0, 1 << 40),
        ]
        drawn = [uniforms(8, zero + i, zero + v, epoch, seed) for i, v, epoch, seed in cases]
        assert len({tuple(u.flatten().tolist()) for u in drawn}) == len(cases)

    def test_more_slots_do_not_move_the_first(self) -> None:
        ids, view = torch.arange(5), torch.ones(5, dtype=torch.int64)
        assert torch.equal(uniforms(6, ids, view, 2, 3), uniforms(32, ids, view, 2, 3)[:6])


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y & WORD, (x >> 32) ^ d ^ m, x & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return [a, b, c, d]
