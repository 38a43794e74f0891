"""What is left of a tilt when the temperature is taken into account."""

from __future__ import annotations

from dataclasses import dataclass

from hardneg.comparing.arms import Arm
from hardneg.comparing.verdict import BUT, paired, resolution_of
from hardneg.reporting.figures import badge, points
from hardneg.reporting.reading import wanted_arm
from hardneg.reporting.story import ArmRuns, Story, Table


@dataclass(frozen=True)
class Twins:
    """A tilted arm beside an untilted one that repels alike: what is left is not a matter of temperature."""

    arm: ArmRuns
    plain: ArmRuns
    temperature: float
    difference: float
    half_width: float
    moving: bool = False  # the tilt is scheduled
    exact: bool = True  # no gradient goes through its weights

    @property
    def beyond_noise(self) -> bool:
        return abs(self.difference) > self.half_width

    def sentence(self) -> str:
        verdict = "beyond noise" if self.beyond_noise else "not beyond noise"
        where = (", where the tilt is strongest" if self.moving else "") + BUT * (not self.exact)
        return (
            f"{badge(self.arm)} and {badge(self.plain)} repel alike "
            f"(effective temperature {self.temperature:.3g}{where}): "
            f"{badge(self.arm)} is {points(self.difference, self.half_width)} points from {badge(self.plain)}, "
            f"{verdict}. That is what is left when the temperature is taken into account."
        )


def twins_of(story: Story) -> list[Twins]:
    if story.kind != "comparison":
        return []
    parsed = [(arm, wanted_arm(arm.text, story.facts)) for arm in story.arms]
    found, resolution = [], resolution_of(story.facts.get("num_test"))
    for arm, tilted in parsed:
        for other, plain in parsed:
            if other is story.arms[0] or tilted is None or plain is None:
                continue  # against the first arm there is a sentence already
            if tilted.has_untilted_twin_in(plain):
                difference, half, _ = paired(arm.row["values"], other.row["values"], resolution)
                found.append(Twins(arm, other, plain.temperature, difference, half, *_how(tilted)))
    return found


def _how(tilted: Arm) -> tuple[bool, bool]:
    return tilted.tilt_moves, tilted.repels_so_exactly


def standing(row: Table) -> str:
    if abs(row["difference"]) <= row["difference_half_width"]:
        return "alike"
    return "above" if row["difference"] > 0 else "below"
