"""`hardneg advise`: place data among the studies of the atlas, and print what to try and the command that decides.

``atlas.json`` beside this file has one entry for each data set of each study: a profile of the data, and what happened
to every arm. ``experiments/atlas.py pack`` writes it from the results of the studies. ``advice_on`` finds the entries
that are nearest to the profile of the user's data, and orders the arms by what they gained there.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hardneg.cli.output import Output
from hardneg.core.text import printable
from hardneg.io.terminal import Terminal

ATLAS = Path(__file__).with_name("atlas.json")
FAR = 1.0
"""Distance from which data are unlike a study: ten times as many items, or ten times the false-negative rate."""
NEAREST, SUGGESTED = 3, 3
"""Number of data sets that are consulted, and largest number of suggestions."""
LEAST_RATE = 1e-4
"""False-negative rate that counts as none."""
USUAL = {
    "image": ("simclr()", "hcl(beta=1, tau_plus=0.1)", "simclr() @ proximity()"),
    "graph": ("graphcl()", "graphcl(negatives='Tilt(1.0)')"),
    "text": ("simcse()", "simcse(negatives='Tilt(1.0)')"),
    "pair": ("pairs()", "pairs(negatives='Tilt(1.0)')", "pairs() @ proximity()"),
    "vector pair": ("pairs()", "pairs(negatives='Tilt(1.0)')", "pairs() @ proximity()"),
}
"""Arms of the comparison that is suggested for data unlike every study, by the kind of items."""


@dataclass(frozen=True)
class Profile:
    """What is known about data before training.

    Attributes:
        kind: "image", "text", "graph", "pair" or "vector pair".
        items: Number of training items.
        false_negatives: Probability that another random item is a false negative: of the same class, or of the same
            document where there are no classes.
        labelled: True if the items have classes.
    """

    kind: str
    items: int
    false_negatives: float
    labelled: bool

    def distance(self, other: Profile) -> float:
        """Return how unlike two profiles are; infinite for other kinds of items, or if only one has classes."""
        if (self.kind, self.labelled) != (other.kind, other.labelled):
            return math.inf
        rates = [max(LEAST_RATE, one.false_negatives) for one in (self, other)]
        return max(abs(math.log10(self.items / other.items)), abs(math.log10(rates[0] / rates[1])))


@dataclass(frozen=True)
class Advice:
    """An arm to try.

    Attributes:
        arm: The arm as text.
        gain: Mean difference to the baseline over the nearest data sets, in points.
        low: Lowest end of its 95 % intervals there.
        high: Highest end.
        seen: What happened: a clause for each data set.
    """

    arm: str
    gain: float
    low: float
    high: float
    seen: list[str]


def advise_and_show(data: str, data_root: str | None, output: Output) -> None:
    """Print the profile of the data, the nearest data sets, suggestions and the command that decides between them.

    Args:
        data: Value of ``--data``.
        data_root: Folder of named data sets.
        output: Where to print: as text or as JSON.
    """
    with output.bars() as bars:
        bars("audit", None)
        found = advice_on(profile_of(data, data_root), json.loads(ATLAS.read_text(encoding="utf-8"))["entries"], data)
    output.result(found, lambda: _show(found))


def profile_of(data: str, data_root: str | None = None) -> Profile:
    """Read data and return their profile."""
    import torch

    from hardneg.training.data.kinds import kind_of
    from hardneg.training.loop.parts import splits
    from hardneg.training.options import RECIPES

    kind = kind_of(data)
    prefix = data.partition(":")[0]
    noun = {"embeddings": "vector pair", "pairs": "pair", "imagetext": "pair"}.get(prefix, kind.noun)
    recipe = {"pair": "pairs", "vector pair": "pairs", "text": "simcse", "graph": "graphcl"}.get(noun, "simclr")
    recipe = "clip" if data.startswith("imagetext:") else recipe
    train = splits(RECIPES[recipe](data=data, data_root=data_root)).train
    groups = train.labels if train.labels is not None else getattr(train, "documents", torch.arange(len(train)))
    counts = torch.unique(groups, return_counts=True)[1].double()
    others = float((counts * (counts - 1.0)).sum()) / (len(train) * max(1, len(train) - 1))
    return Profile(noun, len(train), others, train.labels is not None)


def advice_on(profile: Profile, entries: list[dict[str, Any]], data: str) -> dict[str, Any]:
    """Return suggestions for data of this profile.

    Args:
        profile: Profile of the data.
        entries: Entries of atlas.json.
        data: Value of ``--data``, for the command.

    Returns:
        "profile", "nearest" (names with distances), "suggestions", "command" and "unlike" (True if no study is near).
    """
    ranked = sorted(((profile.distance(Profile(**one["profile"])), one) for one in entries), key=lambda pair: pair[0])
    names = list(dict.fromkeys(_name(one) for distance, one in ranked if distance < FAR))[:NEAREST]
    near = [one for distance, one in ranked if distance < FAR and _name(one) in names]
    suggestions = _suggestions(near)
    arms = [near[0]["baseline"], *(one.arm for one in suggestions)] if near else USUAL[profile.kind]
    flags = " ".join(f'--arm "{arm}"' for arm in dict.fromkeys(arms))
    head = " --option encoder=linear" if data.startswith("embeddings:") else ""
    return {
        "profile": asdict(profile),
        "nearest": {name: min(d for d, one in ranked if _name(one) == name) for name in names},
        "unlike": not near,
        "suggestions": [asdict(one) for one in suggestions],
        "command": f"hardneg compare --data {data} {flags} --tune temperature=0.05,0.1,0.2,0.5 --seeds 5{head}",
    }


def _name(entry: dict[str, Any]) -> str:
    """Return the world and the data set of an entry."""
    return f"{entry['world']}/{entry['data']}"


def _suggestions(near: list[dict[str, Any]]) -> list[Advice]:
    """Order the arms by their mean gain; those that did harm everywhere are left out, and the baseline stays."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in near:
        for arm in entry["arms"]:
            found.setdefault(arm["arm"], []).append({**arm, "data": _name(entry)})
    made = [
        Advice(
            arm,
            sum(one["difference"] for one in seen) / len(seen),
            min(one["low"] for one in seen),
            max(one["high"] for one in seen),
            [f"{one['data']} {one['difference']:+z.1f} ({one['low']:+z.1f} to {one['high']:+z.1f})" for one in seen],
        )
        for arm, seen in found.items()
    ]
    return sorted((one for one in made if one.high > 0.0), key=lambda one: -one.gain)[:SUGGESTED]


def _show(found: dict[str, Any]) -> None:
    """Print the advice."""
    console, profile = Terminal(), found["profile"]
    rate = f"{100 * profile['false_negatives']:.3g} % of random candidates are false negatives"
    console.print(Text(f"{profile['items']:,} training {profile['kind']}s; by classes or documents, {rate}."))
    if found["unlike"]:
        console.print(Text("They are unlike all data that were studied, so nothing is known about them. Compare:"))
    else:
        near = ", ".join(f"{name} ({distance:.2f})" for name, distance in found["nearest"].items())
        console.print(Text(printable(f"Nearest studied data, with distances: {near}.")))
        table = Table("try", "mean gain, points", "where, with 95 % intervals", title_justify="left")
        for one in found["suggestions"]:
            table.add_row(Text(one["arm"]), f"{one['gain']:+z.1f}", "\n".join(one["seen"]))
        console.print(table)
        if not any(one["low"] > 0.0 for one in found["suggestions"]):
            console.print(Text("None of these gained in all of them for certain: a tuned temperature may do as well."))
        console.print(Text("This command decides:"))
    console.print(Text(printable(found["command"])), soft_wrap=True)
