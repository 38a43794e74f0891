"""Mine hard negatives from embeddings with two rules, and measure how hard and how false they are.

    python examples/mine_embeddings.py

Synthetic embeddings: documents in 50 topics, queries near their documents. A negative of the query's topic is false.
"""

import torch
from torch.nn.functional import normalize

import hardneg as hn

torch.manual_seed(0)
topics = torch.arange(5000) % 50
centres = torch.randn(50, 64)
documents = normalize(centres[topics] + 1.5 * torch.randn(5000, 64), dim=-1)
answers = torch.randperm(5000)[:500]  # the document that answers each query
queries = normalize(documents[answers] + 0.2 * torch.randn(500, 64), dim=-1)

corpus = hn.Keys(documents, ids=torch.arange(5000))
for rule in ("Uniform()", "BelowPositive(relative=0.05)", "BelowPositive(relative=0.05) * Rank(100, 200)"):
    mined = hn.mine(hn.Keys(queries), corpus, answers, rule, k=5)
    false = (topics[mined.ids] == topics[answers][:, None]).float().mean()
    print(f"{rule}: similarity {mined.scores.mean():.3f}, false {false:.1%}")

found = hn.audit(documents, ["Tilt(5.0)", "Ring(0.02, 0.1)"], labels=topics, temperature=0.5)
for row in found.rows[:2]:
    print(f"{row.expression}: similarity {row.similarity:.3f}, false {row.false_negatives:.1%}")
