"""``hn.judge``: from vectors and a judge to the false-negative rate of each rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardneg.core.errors import argument_error, check_callable, check_count, check_range, check_seed
from hardneg.core.keyed import uniform_of_pairs
from hardneg.core.types import Keys, hash_text
from hardneg.io.files import locked
from hardneg.judging.asking import Asking, Judge, RowPair, answers_of, confirmed, found_among
from hardneg.judging.design import Design, PairIndices, Population, Sensitivity, equal_texts
from hardneg.judging.folder import Memory, check_state, digest_of_populations
from hardneg.judging.result import Judged, judged_of
from hardneg.judging.rules import DEFAULT, population_of, read_rules
from hardneg.mining.alignment import warn_of_missing_positives
from hardneg.mining.miner import Miner
from hardneg.mining.pairs import Pairs, as_one, numbered_ids
from hardneg.mining.search import Search, SearchKind
from hardneg.mining.select import Rule

NUM_KNOWN = 50
"""Known positives on which the sensitivity of a judge that errs is measured."""


@torch.no_grad()
def judge(
    queries: Any,
    corpus: Any,
    positives: Any,
    rules: Any = DEFAULT,
    k: int = 5,
    judge: Judge | None = None,
    budget: int = 300,
    level: float = 0.05,
    confidence: float = 0.95,
    seed: int = 0,
    *,
    above: float = 0.0,
    confirm: Judge | None = None,
    num_known: int = NUM_KNOWN,
    num_mined: int = 0,
    texts: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
    draw: str = "top",
    temperature: float = 1.0,
    search: Search | SearchKind = "exact",
    out: str | Path | None = None,
) -> Judged:
    """Judge some mined pairs, and bound the false-negative rate of every rule.

    A rule's rate is the share of false negatives among the negatives of ``mine(queries, corpus, positives, rule, k)``.
    Pairs are chosen so that the bounds are valid in finite samples and at whatever moment the judging stops; see
    docs/guides/judge.md. Judging stops when every rule is certified or the budget is used; a budget of at least as many
    judgements as there are pairs gives exact rates.

    Args:
        queries: Vectors of the queries [q, d], as for ``mine``.
        corpus: Vectors of the documents [n, d], as for ``mine``.
        positives: Corpus ids of the positives of each query, as for ``mine``; they are never judged.
        rules: Expressions or distributions; braces make a family: ``"BelowPositive(relative={0.2, 0.1, 0.05})"``. The
            result names them as they are given. Four to six rules are a good number.
        k: Number of negatives per query.
        judge: Function of ``[(query row, document row), ...]`` that returns, for each pair, True or a grade above
            ``above`` if the document is relevant to the query, and None if it cannot tell.
        budget: Largest number of pairs to judge.
        level: Largest acceptable false-negative rate.
        confidence: Confidence of the certificates and of the upper bounds.
        seed: Seed of the order in which pairs are judged.
        above: A pair with a grade above this is a false negative.
        confirm: A second judge, usually a person, who checks each pair that ``judge`` flags. The bounds then
            allow for false negatives that ``judge`` misses, by its sensitivity on known positives.
        num_known: Known positives that ``judge`` is tested on if there is a ``confirm``.
        num_mined: Pairs of the hardest rule that both ``judge`` and ``confirm`` answer first; the sensitivity
            is then measured on the false negatives among them instead of on known positives.
        texts: Texts of queries and of documents; pairs of the same texts share an answer.
        draw: How each rule draws its negatives, as in ``mine``.
        temperature: Temperature of tilts, as in ``mine``.
        search: How candidates are found, as in ``mine``.
        out: Folder that keeps every answer as soon as it is given. A call with the same data and options continues
            there, after a kill or with a larger budget, and asks no pair twice.

    Returns:
        Rates with bounds, the hardest certified rule, and the judged pairs.

    Raises:
        ArgumentError: If an argument does not fit, a rule leaves no negatives, or the judge's answers are malformed.
        DataChanged: If the pairs or the options differ from those of the first call with the same ``out``.
        InUse: If another process works in the folder.

    Example:
        >>> truth = torch.arange(40) % 8
        >>> corpus = torch.nn.functional.normalize(torch.eye(8)[truth] + 0.4, dim=1)
        >>> positives = [(i + 8) % 40 for i in range(40)]
        >>> def same_topic(pairs):
        ...     return [bool(truth[query] == truth[document]) for query, document in pairs]
        >>> found = judge(corpus, corpus, positives, ["Rank(0, 5)", "Rank(10, 20)"], 3, same_topic, budget=500)
        >>> found.rates
        {'Rank(10, 20)': (0.0, 0.0, 0.0), 'Rank(0, 5)': (1.0, 1.0, 1.0)}
        >>> found.chosen
        'Rank(10, 20)'
    """
    check_callable("judge", "judge", judge, "a function of pairs as judge")
    assert judge is not None
    if confirm is not None:
        check_callable("judge", "confirm", confirm, "a function of pairs as confirm")
    budget, k, seed = check_count("judge", "budget", budget), check_count("judge", "k", k), check_seed("judge", seed)
    num_known = check_count("judge", "num_known", num_known)
    num_mined = check_count("judge", "num_mined", num_mined, least=0)
    if num_mined and confirm is None:
        raise argument_error("judge", "a judge for confirm if num_mined is set", "num_mined", num_mined)
    if num_mined > budget:
        raise argument_error("judge", f"num_mined within the budget of {budget}", "num_mined", num_mined)
    check_promise(level, confidence)
    wanted = read_rules(rules)
    corpus = corpus if isinstance(corpus, Keys) else Keys(corpus)
    positives = numbered_ids(positives, corpus.names)
    queries, corpus = as_one(queries if isinstance(queries, Keys) else Keys(queries), corpus)
    keys = _text_keys(texts, (len(queries), len(corpus)))
    populations: list[Population] = []
    known: Pairs | None = None
    for given, negatives in wanted:
        search_options = Search(search) if isinstance(search, str) else search
        miner = Miner(queries, corpus, positives, Rule(negatives, k, draw, seed), temperature, search=search_options)
        known = miner.scorer.positives
        warn_of_missing_positives(known, negatives)
        populations.append(population_of(given, negatives, miner.joined(miner.mined())))
    assert known is not None
    identities = _identities(queries, len(queries)), _identities(corpus, len(corpus))
    asking = Asking(Design(populations, level, confidence, seed, *keys, identities), above)
    sample = (some_positives(known, num_known, seed), num_mined) if confirm is not None else None
    if out is None:
        return _ask(asking, judge, confirm, sample, confidence, [budget])
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", "judge", fix="wait until it ends, or use another folder as out"):
        memory = Memory(folder)
        promise = {"level": level, "confidence": confidence, "seed": seed, "above": above}
        pairs = {"pairs": digest_of_populations(populations), "rules": [one.name for one in asking.design.populations]}
        texts_of = [None if one is None else hash_text(str(one.tolist())) for one in keys]
        check_state(folder, {**pairs, "texts": texts_of, **promise, "sample": sample}, begun=bool(memory.budgets))
        confirm = None if confirm is None else memory.of("confirm", confirm)
        return _ask(asking, memory.of("judge", judge), confirm, sample, confidence, memory.begin(budget))


def _ask(
    asking: Asking,
    judge: Judge,
    confirm: Judge | None,
    sample: tuple[list[RowPair], int] | None,
    confidence: float,
    budgets: list[int],
) -> Judged:
    """Ask the judges, after measuring the sensitivity of the first one if there are two.

    Args:
        asking: The questions.
        judge: The judge.
        confirm: The judge of what the first one flags, or None.
        sample: Known positives, and the number of mined pairs that measure the sensitivity instead.
        confidence: Confidence of the certificates.
        budgets: Largest numbers of answers of the first judge: those of earlier calls, and the current one.
    """
    first, confirmations = judge, [0]
    if confirm is not None:
        positives, num_mined = sample or ([], 0)
        if num_mined:
            asking.design.sensitivity = _checked(asking, judge, confirm, num_mined)
            confirmations[0] = len(asking.grades)
        else:
            found = found_among(judge, positives, asking.above)
            asking.design.sensitivity = Sensitivity.of(*found, 1 - confidence)
        first = confirmed(judge, confirm, asking.above, lambda n: confirmations.__setitem__(0, confirmations[0] + n))
    for budget in budgets:
        asking.ask(first, min(budget, budgets[-1]))
    return judged_of(asking, confidence, budgets[-1], confirmations[0])


def _checked(asking: Asking, judge: Judge, confirm: Judge, number: int) -> Sensitivity:
    """Have both judges answer a sample of the hardest rule, and return the sensitivity of the first one."""
    design = asking.design
    sample = design.sample(number)
    questions = list(dict.fromkeys(sample.tolist()))
    pairs = asking.pairs(np.array(questions))
    grades, people = (dict(zip(questions, answers_of(one, pairs), strict=True)) for one in (judge, confirm))
    for question in questions:
        asking.put_checked(question, grades[question], people[question], asking.above)
    return asking.sensitivity(sample, grades, people, asking.above)


def check_promise(level: float, confidence: float) -> None:
    """Raise unless the level is a share below 1 and the confidence is between a half and 1."""
    check_range("judge", "level", level, 0.0, 1.0, open_high=True)
    check_range("judge", "confidence", confidence, 0.5, 1.0, open_high=True)


def some_positives(known: Pairs, number: int, seed: int) -> list[RowPair]:
    """Return some known positives, drawn with the seed.

    Args:
        known: Positives of each query.
        number: Number of pairs; all if there are fewer.
        seed: Seed of the draw.
    """
    query, rows = known.of(torch.arange(len(known), device=known.start.device))
    query, rows = query.cpu(), rows.cpu()
    order = uniform_of_pairs(~seed, query, rows[:, None])[:, 0].argsort()[:number]
    return list(zip(query[order].tolist(), rows[order].tolist(), strict=True))


def _text_keys(texts: tuple[Any, Any], sizes: tuple[int, int]) -> tuple[PairIndices | None, PairIndices | None]:
    """Return the keys by which pairs of the same texts share an answer."""
    for name, given, size in zip(("queries", "corpus"), texts, sizes, strict=True):
        if given is not None and len(given) != size:
            raise argument_error("judge", f"one text for each of the {size} {name}", "texts", f"{len(given)} texts")
    return equal_texts(texts[0]), equal_texts(texts[1])


def _identities(keys: Keys, size: int) -> PairIndices:
    """Return the numbers from which random numbers are made: ids, and rows where there is no id."""
    rows = np.arange(size, dtype=np.int64)
    if keys.ids is None:
        return rows
    ids = keys.ids.cpu().numpy().astype(np.int64)
    return np.where(ids >= 0, ids, rows)
