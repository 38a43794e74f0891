"""What is left of a tilt when the temperature is taken into account."""

from __future__ import annotations

from dataclasses import dataclass

from hardneg.comparison import paired
from hardneg.report.figures import badge, points
from hardneg.report.reading import wanted_arm
from hardneg.report.story import ArmRuns, Story, Table


@dataclass(frozen=True)
class Twins:
    """A tilted arm beside an untilted one that repels alike: what is left is not a matter of temperature."""

    arm: ArmRuns
    plain: ArmRuns
    temperature: float
    difference: float
    half_width: float

    @property
    def beyond_noise(self) -> bool:
        return abs(self.difference) > self.half_width

    def sentence(self) -> str:
        verdict = "beyond noise" if self.beyond_noise else "not beyond noise"
        return (
            f"{badge(self.arm)} and {badge(self.plain)} repel alike (effective temperature {self.temperature:.3g}): "
            f"{badge(self.arm)} is {points(self.difference, self.half_width)} points from {badge(self.plain)}, "
            f"{verdict}. That is what is left when the temperature is taken into account."
        )


def twins_of(story: Story) -> list[Twins]:
    if story.kind != "comparison":
        return []
    parsed = [(arm, wanted_arm(arm.text, story.facts)) for arm in story.arms]
    found = []
    for arm, tilted in parsed:
        for other, plain in parsed:
            if other is story.arms[0] or tilted is None or plain is None or tilted.recipe != plain.recipe:
                continue  # against the first arm there is a sentence already
            ratio = tilted.effective_temperature / plain.effective_temperature
            if tilted.beta > 0.0 and plain.beta == 0.0 and abs(ratio - 1.0) < 0.02:
                difference, half, _ = paired(arm.row["values"], other.row["values"])
                found.append(Twins(arm, other, plain.effective_temperature, difference, half))
    return found


def standing(row: Table) -> str:
    if abs(row["difference"]) <= row["difference_half_width"]:
        return "alike"
    return "above" if row["difference"] > 0 else "below"
