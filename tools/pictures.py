"""Writes two pictures of the README and the docs from real digits and library calls.

    python tools/pictures.py          # docs/figures/one_anchor.svg and docs/figures/digits.svg

The first shows one image, eight candidates and the probability of each under four rules; the second where rules lie
between easy and false negatives.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.auditing.page import frontier_svg
from hardneg.pages.graph_drawing import thumbnail

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RULES = {
    "Uniform()": "every candidate alike",
    "Tilt(1.0)": "the closer, the more",
    "Ring(0.125, 0.625)": "the middle ranks",
    "BelowPositive(absolute=0.1)": "not as close as the positive",
}
TEMPERATURE = 0.5
ANCHOR = 7
COSINES = (0.85, 0.6, 0.4, 0.3, 0.2, 0.05, -0.1, -0.3)
"""The candidates are the images nearest to these similarities."""
AUDITED = [
    "Uniform()",
    "Tilt(1.0)",
    "Tilt(5.0)",
    "Ring(0.0, 0.1)",
    "Ring(0.1, 0.5)",
    "Ring(0.15, 0.3)",
    "Rank(0, 10)",
    "BelowPositive(absolute=0.1)",
    "BelowPositive(relative=0.2) * Rank(0, 10)",
]


class Example(NamedTuple):
    """An anchor, its positive and candidates from close to far, with the probabilities of each rule [rules, 8]."""

    images: list[Tensor]
    digits: list[int]
    similarities: list[float]
    probabilities: Tensor


class Digits(NamedTuple):
    """Images of uint8 [n, 1, 8, 8], their pixels and those of a second view as unit vectors [n, 64], and digits [n]."""

    images: Tensor
    views: Tensor
    vectors: Tensor
    second: Tensor
    digits: Tensor


def read() -> Digits:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)
    views = (images + images.roll(1, dims=2)) / 2.0  # half a pixel to the right
    mean = images.mean(0)
    vectors, second = (normalize((each - mean).flatten(1), dim=1) for each in (images, views))
    drawn, shifted = ((255 - each * 255 / 16).byte().unsqueeze(1) for each in (images, views))
    return Digits(drawn, shifted, vectors, second, torch.tensor(data.target))


def example() -> Example:
    data = read()
    cosines = data.vectors[ANCHOR] @ data.vectors.T
    cosines[ANCHOR] = -2.0
    chosen = [int((cosines - wanted).abs().argmin()) for wanted in COSINES]
    similarity = torch.cat([data.vectors[ANCHOR] @ data.second[ANCHOR, :, None], cosines[chosen]]).unsqueeze(0)
    scores = hn.from_matrix(similarity, torch.tensor([[True] + 8 * [False]]), TEMPERATURE)
    weights = [hn.parse(rule).log_weights(scores).softmax(dim=1)[0, 1:] for rule in RULES]
    images = [data.images[ANCHOR], data.views[ANCHOR], *data.images[chosen]]
    digits = [int(data.digits[ANCHOR])] * 2 + data.digits[chosen].tolist()
    return Example(images, digits, similarity[0].tolist(), torch.stack(weights))


def one_anchor(shown: Example) -> str:
    """One column per candidate, one row per rule; bars are probabilities."""
    left, step, top, row = 330, 66, 118, 84
    width, height = left + 8 * step + 14, top + len(RULES) * row + 8
    own = shown.digits[0]
    parts = [_image(shown.images[0], 14, 32, "the anchor"), _image(shown.images[1], 104, 32, "its positive")]
    parts.append(_text(133, 104, f"similarity {shown.similarities[0]:.2f}", "middle"))
    parts.append(_text(left, 18, "eight candidates, from close to far", "start"))
    for place, (image, digit, cosine) in enumerate(
        zip(shown.images[2:], shown.digits[2:], shown.similarities[1:], strict=True)
    ):
        x = left + place * step
        parts += [_image(image, x, 32, ""), _text(x + 28, 104, f"{cosine:.2f}", "middle")]
        if digit == own:
            parts.append(f'<rect class="false" x="{x - 3}" y="29" width="62" height="62"/>')
    for number, ((rule, meaning), weights) in enumerate(zip(RULES.items(), shown.probabilities.tolist(), strict=True)):
        base = top + (number + 1) * row - 22
        parts += [_text(14, base - 24, rule, "start", "rule"), _text(14, base - 6, meaning, "start")]
        parts.append(f'<line x1="{left - 4}" x2="{width - 10}" y1="{base}" y2="{base}"/>')
        for place, weight in enumerate(weights):
            x, tall = left + place * step, 110 * weight
            kind = "false bar" if shown.digits[2 + place] == own else "bar"
            if weight > 0:
                parts.append(f'<rect class="{kind}" x="{x + 8}" y="{base - tall:.1f}" width="40" height="{tall:.1f}"/>')
            parts.append(_text(x + 28, base + 15, f"{100 * weight:.1f} %".replace(".0 ", " "), "middle"))
    style = (
        "text{font:13px system-ui,sans-serif;fill:#444}.rule{font:bold 14px ui-monospace,monospace;fill:#111}"
        "line{stroke:#888}.bar{fill:#3b6ea5}rect.false{fill:none;stroke:#c8553d;stroke-width:2.5}"
        "rect.false.bar{fill:#c8553d;stroke:none}image{image-rendering:pixelated}"
    )
    label = "Probability of eight candidates under four rules; " + "; ".join(
        f"{rule}: {', '.join(f'{weight:.2f}' for weight in weights)}"
        for rule, weights in zip(RULES, shown.probabilities.tolist(), strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f'<style>{style}</style><rect width="100%" height="100%" rx="6" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _image(image: Tensor, x: int, y: int, name: str) -> str:
    picture = f'<image x="{x}" y="{y}" width="56" height="56" href="{thumbnail(image)}"/>'
    return picture + (_text(x + 28, 18, name, "middle") if name else "")


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def frontier() -> str:
    data = read()
    return frontier_svg(
        hn.audit(
            data.vectors, AUDITED, positives=data.second, labels=data.digits, temperature=TEMPERATURE, frontier=False
        )
    )


def main() -> None:
    for name, text in (("one_anchor", one_anchor(example())), ("digits", frontier())):
        (FIGURES / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
