"""The batch of the corner cases, every objective, and examples of every distribution."""

import torch

import hardneg as hn

OBJECTIVES = {
    "info_nce": hn.info_nce,
    "info_nce, mass": lambda s, w: hn.info_nce(s, w, num_negatives="mass"),
    "info_nce, candidates": lambda s, w: hn.info_nce(s, w, num_negatives="candidates"),
    "info_nce, 7 negatives": lambda s, w: hn.info_nce(s, w, num_negatives=7),
    "info_nce, all": lambda s, w: hn.info_nce(s, w, positives_in_denominator="all"),
    "info_nce, none": lambda s, w: hn.info_nce(s, w, positives_in_denominator="none"),
    "info_nce, debiased": lambda s, w: hn.info_nce(s, w, tau_plus=0.2),
    "jsd": hn.jsd,
    "jsd, debiased": lambda s, w: hn.jsd(s, w, tau_plus=0.2),
    "sigmoid": hn.sigmoid,
    "surrogate": hn.surrogate,
    "surrogate, normed": lambda s, w: hn.surrogate(s, w, log_norm=torch.ones(w.shape[0]).double()),
}
EXAMPLES = [
    text
    for name, cls in sorted(hn.registered_negatives().items())
    if cls.__module__.startswith("hardneg.negatives")
    for text in cls.examples or (f"{name}()",)
]
LABELS, CLUSTERS = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 0])


def batch_and_queue(z1, z2, pool):
    """Two views of five instances beside a queue of six, in which instance 1 is again."""
    queue = hn.Keys(
        pool, torch.tensor([10, 11, 1, 12, 13, 14]), torch.arange(6) % 3, torch.arange(6) % 2, source="queue"
    )
    return hn.two_views(z1, z2, 0.5, ids=torch.arange(5), labels=LABELS, clusters=CLUSTERS, extra=[queue])
