"""What disks, kills and copies do to a file: cut short, an end that is lost, a sector of zeros, one flipped bit."""

from __future__ import annotations

from pathlib import Path
from random import Random

KINDS = ("truncation", "lost tail", "zeroed sector", "flip")
SECTOR = 512


def damaged(content: bytes, kind: str, chance: Random) -> bytes:
    """Other content: of any shorter length, without its last block, with zeros in a sector, or with a bit flipped."""
    size = len(content)
    if kind == "truncation":
        return content[: chance.randrange(size)]
    if kind == "lost tail":
        block = chance.choice((1, 81, SECTOR, 8 * SECTOR))
        return content[: max(0, size - 1) // block * block]
    if kind == "zeroed sector":
        sectors = range(0, size, SECTOR)
        places = [place for place in sectors if any(content[place : place + SECTOR])]
        place = chance.choice(places)
        return content[:place] + bytes(min(SECTOR, size - place)) + content[place + SECTOR :]
    bit = chance.randrange(8 * size)
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def damage(path: Path, kind: str, chance: Random) -> str:
    """Damages a file; returns what was done, in words."""
    before = path.read_bytes()
    after = damaged(before, kind, chance)
    assert after != before
    path.write_bytes(after)
    first = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return f"{kind} of {path.name} from byte {first}: {len(before)} bytes, then {len(after)}"
