"""hn.audit: how hard, how false and how concentrated negatives are, from tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.dataset import read_dataset
from hardneg.auditing.files import as_audit_errors, audit_files
from hardneg.auditing.findings import find_in_rows
from hardneg.auditing.options import AuditOptions, Settings
from hardneg.auditing.prepare import make_audited_pairs
from hardneg.auditing.result import Audit
from hardneg.auditing.rules import Expressions, given_rules
from hardneg.auditing.sampling import audit_pairs
from hardneg.core.errors import ArgumentError
from hardneg.core.types import Given, Keys
from hardneg.mining.dataset import is_dataset
from hardneg.mining.engine import Mined
from hardneg.mining.judgements import Tag
from hardneg.mining.options import TEMPERATURE
from hardneg.mining.pairs import Positives, RowsOf, numbered_ids


def audit(
    embeddings: Given | Keys | Any = None,
    expressions: Expressions = (),
    *,
    corpus: Given | Keys = None,
    positives: Positives | str | None = None,
    judgements: Positives | None = None,
    judged_negatives: Positives | None = None,
    held_out_judgements: Positives | None = None,
    labels: Tag | None = None,
    groups: Tag | None = None,
    mined: Mined | Annotated[Tensor, "q k"] | str | Path | None = None,
    model: Any = None,
    encoder: str | None = None,
    cache: str | Path | None = None,
    temperature: float = TEMPERATURE,
    tau_plus: float = 0.0,
    near_duplicate: float = 0.95,
    num_anchors: int = 512,
    seed: int = 0,
    wanted_false_negatives: float | None = None,
    frontier: bool = True,
    normalize: bool = True,
    memory: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """How hard, how false and how concentrated the negatives of each expression are on these embeddings.

    embeddings: the anchors [a, d], a tensor, an array or Keys; they are the candidates, too, unless there is a
        ``corpus``. Or a ``datasets.Dataset`` of anchor, positive and negatives, or of documents with labels 0 and 1,
        with a ``model`` (or a function) to embed its texts.
    positives: vectors of a second view [a, d]; ids of candidates as in ``mine``; ``"label"``: one row of the same
        label stands in; None: the first judgement of each query, or no positive.
    labels, groups, judgements: what false negatives are known by. Labels and groups of a corpus are those of its Keys
        (``labels``, ``clusters``); judgements are relevant ids for each query as in ``mine``, the best first. What is
        not judged is unknown, so that judgements give lower bounds, and rules are neither compared nor suggested by
        them. judged_negatives: ids that are judged and not relevant.
    held_out_judgements: relevant ids that mining has not seen. They give the rate of false negatives: pairs that are
        not among them count as true negatives, and queries without one are left out.
    mined: negatives of each query, as ``mine`` gives them or as ids [q, k]; or the path of a mined file, which then
        needs nothing else (see docs/guides/audit.md).
    model, encoder, cache: of the texts of a mined file whose embeddings are missing: a sentence-transformers model,
        ``"module:function"`` or ``"file.py:function"``, and the folder of embeddings. Nothing in a file chooses them.
    temperature, tau_plus: of the loss; tilts weigh by exp(beta * similarity / temperature), as in ``mine``.
    near_duplicate: cosine from which a candidate is a copy of the anchor or of a positive.
    num_anchors: how many are looked at, drawn with ``seed``; all of them if there are no more.
    wanted_false_negatives: search for the hardest rules that stay at or below this share.
    frontier: also measure a default set of rules; False for logging in training.
    normalize: take the vectors at unit length; False takes the dot product as it is.
    memory: GiB for the similarities with a corpus of more than 256 MiB, which may be memory-mapped: it is read once for
        as many anchors as fit.

    >>> z = torch.nn.functional.normalize(torch.randn(64, 8), dim=-1)
    >>> found = audit(z, ["Uniform()", "Tilt(2.0)"], labels=torch.arange(64) % 4, frontier=False)
    >>> round(found.row("Uniform()").false_negatives, 4)  # 15 of the 63 others
    0.2381
    >>> found.row("Tilt(2.0)").similarity > found.random_similarity
    True
    """
    settings = Settings(
        temperature, tau_plus, near_duplicate, num_anchors, seed, wanted_false_negatives, frontier, memory
    )
    rules = given_rules(expressions)
    if is_dataset(embeddings):
        embeddings, corpus, positives, mined = read_dataset(embeddings, model)
    if isinstance(mined, (str, Path)):
        if embeddings is not None or corpus is not None:
            raise ArgumentError("audit", "the path of a mined file alone, or tensors", "both", "see AuditOptions")
        texts = tuple(rule.name for rule in rules)
        folder = None if cache is None else str(cache)
        options = AuditOptions(str(mined), texts, settings, model=model, encoder=encoder, cache=folder)
        return audit_files(options, progress=progress)
    if embeddings is None:
        raise ArgumentError("audit", "embeddings, or the path of a mined file as mined=...", "neither")
    with as_audit_errors(), torch.no_grad():
        audited = make_audited_pairs(
            embeddings,
            corpus,
            positives=positives,
            judgements=judgements,
            judged_negatives=judged_negatives,
            held_out_judgements=held_out_judgements,
            labels=labels,
            groups=groups,
            normalize=normalize,
            seed=seed,
        )
        listed = None if mined is None else listed_rows(audited, mined)
        found = audit_pairs(audited, rules, settings, listed=listed, progress=progress)
        return found if listed is None else replace(found, mined=find_in_rows(audited, listed))


def listed_rows(audited: AuditedPairs, mined: Mined | Tensor) -> Annotated[Tensor, "a k"]:
    """The negatives of each anchor as rows of the candidates, -1 where short."""
    if isinstance(mined, Mined):
        rows = mined.rows
    else:
        ids, mined = audited.candidate_tags.ids, numbered_ids(mined, None)
        if not isinstance(mined, Tensor) or mined.ndim != 2 or mined.is_floating_point():
            got = f"{tuple(mined.shape)} of {mined.dtype}" if isinstance(mined, Tensor) else type(mined).__name__
            raise ArgumentError("audit", "what hn.mine returned, or whole numbers as ids [q, k], as mined", got)
        rows = RowsOf(ids, len(audited.candidates))(mined.cpu().flatten()).view(mined.shape)
        if bool(((rows < 0) & (mined.cpu() != -1)).any()):
            raise ArgumentError("audit", "mined ids that are in the corpus (or -1 where short)", "others")
    if len(rows) != len(audited.anchors):
        raise ArgumentError("audit", f"mined negatives of {len(audited.anchors)} anchors", str(len(rows)))
    return rows
