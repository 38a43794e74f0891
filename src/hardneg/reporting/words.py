"""The words on the page, for a reader who has not read the papers."""

from __future__ import annotations

from html import escape

from hardneg.reporting.story import Story

NOISE = "± and noise"


WORDS = {
    "Negative": "An image that another image, the <em>anchor</em>, is pushed away from.",
    "Hardness": "How alike an anchor and its negatives are: the mean cosine similarity, weighted as the arm weights "
    "them. 1 is the same direction, 0 is unrelated. Hard negatives teach finer differences, easy ones teach little.",
    "False negative": "A negative of the anchor's own class. It is pushed away although it belongs near. The harder "
    "the negatives, the more of them tend to be false. Labels are used to count them.",
    "Effective temperature": "Similarities are divided by a temperature; the lower it is, the more the nearest "
    "negatives push. Preferring hard negatives by a tilt <em>beta</em> pushes like the temperature divided by "
    "(1 + beta), before the gradient through its weights is counted; without that gradient (detach=True) exactly so. "
    "With it, easy negatives may even be pulled closer. So a tilted arm is only worth its name if it beats a plain one "
    "at that lower temperature.",
    "Clamped": "Some arms subtract an estimate of the false negatives (<em>tau_plus</em>). Where that would leave less "
    "than is possible, the result is clamped to the least possible value, and the negatives of that pair push no more.",
    "Effective number of negatives": "How many equally weighted negatives would be as concentrated (1 / sum of the "
    "squared weights). Close to the number in the batch: all count. Small: a few decide.",
    NOISE: "95 % intervals that count both what is random in training (the seeds) and which images happen to be in the "
    "test set. A difference is taken seed by seed and image by image; it is beyond noise where its interval leaves out "
    "0. There is no verdict with fewer than three seeds.",
}


def words_section(story: Story) -> str:
    told = {word: WORDS[word] for word in WORDS if story.kind != "run" or word != NOISE}
    rows = "".join(f"<div><dt>{escape(word)}</dt><dd>{meaning}</dd></div>" for word, meaning in told.items())
    return f'<section><h2 class="h">The words on this page</h2><dl class="words">{rows}</dl></section>'
