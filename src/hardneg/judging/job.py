"""`hardneg judge`: mine the pairs of several rules, have some of them judged, and write what is known.

``run`` is the entry point. It works in rounds in one folder (``folder.py``): each run continues where the last one
stopped, with the answers that have been given since. A judge that is a program answers at once; people get a sheet.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hardneg.core.errors import NoFile
from hardneg.io.files import locked, output_folder, run_again, write_atomically, write_json
from hardneg.io.outputs import check_output
from hardneg.io.provenance import environment
from hardneg.judging.asking import Asking, Grade, RowPair, answers_of, found_among
from hardneg.judging.design import Design, Sensitivity
from hardneg.judging.folder import AnswerLog, check_state
from hardneg.judging.judges import (
    Estimate,
    LLMJudge,
    OfTexts,
    OverCap,
    calibrated,
    digest_of_text,
    function_judge,
    read_prompt,
)
from hardneg.judging.options import FILE, MODEL, JudgeOptions
from hardneg.judging.page import examples_of, judge_page
from hardneg.judging.pairs import MinedPairs
from hardneg.judging.result import Judged, judged_of
from hardneg.judging.rules import DEFAULT
from hardneg.judging.sheet import SheetRow, Votes, read_answers, votes_of, write_sheet
from hardneg.mining.checks import check_options
from hardneg.mining.inputs import StageProgress, from_beir, quiet
from hardneg.mining.manifest import paths_read, stamps_of
from hardneg.mining.options import MineOptions
from hardneg.mining.pair_scores import pair_scorer
from hardneg.pages.render import write_page

_may_change = ("device", "cache", "batch_size", "query_block", "memory", "out", "overwrite")
"""Options of mining that do not change which pairs are judged."""

_files = (
    "state.json", "populations.npz", "answers.jsonl", "llm.jsonl", "prompt.txt", "judgements.tsv", "judge.json",
    "judge.html", "sheet.csv", "sheet.html",
)  # fmt: skip

Say = Callable[[str], None]

_to_answer = 20
"""Pairs that people answer first, to find the threshold of a CrossEncoder; known positives are its other side."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a run, for the terminal.

    Attributes:
        result: Rates and choice so far.
        folder: The folder of the judgement.
        waiting: Pairs on the sheet that wait for an answer; 0 if judging has ended.
        ignored: Answers for pairs that are not on a sheet.
        people: Names of the people who have answered.
        kappa: Their agreement; NaN if no pair was answered by two.
    """

    result: Judged
    folder: Path
    waiting: int
    ignored: int
    people: list[str]
    kappa: float


def run(options: JudgeOptions, progress: StageProgress = quiet, say: Say = lambda line: None) -> Outcome:
    """Judge pairs, continuing what the folder already contains.

    Args:
        options: Inputs, rules, judge and budget.
        progress: Called at the start of each stage.
        say: Called with lines to show, such as the estimate of what an LLM will use.

    Returns:
        Rates so far, and how many pairs wait for an answer of a person.

    Raises:
        ArgumentError: If options contradict each other or the data.
        DataChanged: If an input or an option differs from that of the first run.
        InUse: If another process works in the same folder.
    """
    folder = output_folder(options.mining.out)
    if options.resume and not (folder / "state.json").exists():
        raise NoFile("judge", "a judgement to resume", folder / "state.json")
    mining = from_beir(options.mine_options())
    check_options(mining)
    _check_folder(folder, list(paths_read(mining).values()))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", "judge", fix=f"wait until it ends, or use another --out than {folder}"):
        return Round(options, mining, folder, progress, say).run()


def _check_folder(folder: Path, reads: list[Path]) -> None:
    """Raise before the work if a file of the folder is an input, or if something else has written it."""
    for name in _files:
        known = (folder / "state.json").exists()
        check_output("judge", folder / name, reads, overwrite=False, is_ours=lambda: known)  # noqa: B023


@dataclass(eq=False)
class Round:
    """One run in the folder of a judgement.

    Attributes:
        options: Options of the command.
        mining: Options of the mining.
        folder: The folder.
        progress: Called at the start of each stage.
        say: Called with lines to show.
        records: The stored answers.
        ignored: Answers for pairs that are not on a sheet.
        sample: Questions that people answer whatever the judge says.
        estimated: Whether the use of an LLM has been announced.
    """

    options: JudgeOptions
    mining: MineOptions
    folder: Path
    progress: StageProgress
    say: Say
    records: list[dict[str, Any]] = field(default_factory=list)
    ignored: int = 0
    sample: set[int] = field(default_factory=set)
    estimated: bool = False

    def run(self) -> Outcome:
        """Read what there is, ask, and write what is known."""
        self.records = self.log.read()
        judge, name = self._judge()
        self._check_state(name)
        self._take_answers()
        votes = votes_of(self._of_kind("person"), self._above_of_people())
        promise = self.options.false_negatives, self.options.confidence
        design = Design(self.pairs.populations, *promise, self.mining.seed, *self.pairs.keys(), self.pairs.identities())
        asking = Asking(design, 0.0)
        pending: list[RowPair] = []
        if judge is not None and (to_calibrate := self._to_calibrate(asking, votes)):
            judge, pending = None, to_calibrate
        elif judge is not None:
            self._calibrate(judge, votes)
        asking.above = self._above()
        if judge is not None and self.options.num_mined:
            design.sensitivity, pending = self._checked(asking, judge, name, votes)
        elif judge is not None and self.options.confirm:
            design.sensitivity = self._sensitivity(judge, name)
        self._put_known(asking, votes)
        if judge is None:
            pending = pending or asking.next(self.options.budget, self._begun())
            self._store_batch(pending)
        elif pending:  # the sensitivity is needed first, to know what else to ask
            self._put_unconfirmed(asking, votes)
        else:
            pending = self._ask(asking, judge, name, votes)
        if self.options.sheet:
            pending = pending[: self.options.sheet]
        people = {ids_in(one) for one in self._of_kind("person")}
        confirmations = len(people) if self.options.confirm else 0
        result = judged_of(asking, self.options.confidence, self.options.budget, confirmations)
        self._write(result, pending, votes)
        return Outcome(result, self.folder, len(pending), self.ignored, votes.people(), votes.kappa())

    @cached_property
    def pairs(self) -> MinedPairs:
        """The pairs that can be judged."""
        rules = list(self.options.rules) or [DEFAULT]
        return MinedPairs(rules, self.mining, self.folder / "populations.npz", self.progress)

    @cached_property
    def log(self) -> AnswerLog:
        """The answers."""
        return AnswerLog(self.folder / "answers.jsonl")

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def _keep(self, kind: str, pair: tuple[str, str], grade: Grade, by: str) -> None:
        """Store an answer on the disk."""
        record = {"kind": kind, "query": pair[0], "document": pair[1], "grade": grade, "by": by}
        self.log.append(record)
        self.records.append(record)

    def _above(self) -> float:
        """Return the grade above which a pair is a false negative; calibrated once for a CrossEncoder."""
        known = self.options.threshold
        if known is not None:
            return known
        stored = self._of_kind("threshold")
        return float(stored[-1]["grade"]) if stored else 0.0

    def _above_of_people(self) -> float:
        """Return the grade of people above which a pair is a false negative; they confirm with yes and no."""
        return (self.options.above or 0.0) if self.options.judge == FILE else 0.0

    def _judge(self) -> tuple[OfTexts | None, str]:
        """Return the judge, None for people, and what identifies it."""
        kind = self.options.judge
        if kind == FILE:
            return None, FILE
        if kind == "llm":
            prompt = read_prompt(self.options.asking.prompt)
            if self.options.asking.prompt is None:
                write_atomically(self.folder / "prompt.txt", lambda file: file.write(prompt.encode()), run_again)
            self._llm = LLMJudge(self.options.asking, prompt, AnswerLog(self.folder / "llm.jsonl"))
            return self._llm, f"llm:{self.options.asking.llm} {digest_of_text(prompt)}"
        if kind.startswith(MODEL):
            model = kind.removeprefix(MODEL)
            score = pair_scorer(model, self.mining.batch_size, self.mining.device, f"--judge {MODEL}")
            return lambda pairs: [float(one) for one in np.asarray(score(pairs)).reshape(-1)], kind
        return function_judge(kind)

    def _check_state(self, judge: str) -> None:
        """Raise if the inputs, the rules or the judge differ from those of the first run."""
        settings = {name: value for name, value in asdict(self.mining).items() if name not in _may_change}
        promise = {"false_negatives": self.options.false_negatives, "confidence": self.options.confidence}
        wanted = {
            "inputs": stamps_of(self.mining),
            "rules": [repr(negatives) for _, negatives in self.pairs.rules],
            "options": {
                **{name: value for name, value in settings.items() if name not in paths_read(self.mining)},
                **promise,
                "judge": judge,
                "above": self.options.threshold,
                "confirm": self.options.confirm,
                # A sample that grows until the result pleases would not be random.
                **(
                    {"num_known": self.options.num_known, "num_mined": self.options.num_mined}
                    if self.options.confirm
                    else {}
                ),
            },
        }
        check_state(self.folder, wanted, begun=any(record["kind"] != "batch" for record in self.records))
        self.records = self.log.read()

    def _take_answers(self) -> None:
        """Store new answers of people: from sheet.csv, the folder ``answers`` and --answers."""
        places = [self.folder / "sheet.csv", *sorted((self.folder / "answers").glob("*.[ct]sv"))]
        files = [path for path in places if path.is_file()] + [Path(path) for path in self.options.answers]
        new = Votes(self._above_of_people())
        for path in files:
            read_answers(path, new)
        before = votes_of(self._of_kind("person"), new.above)
        asked = self.pairs.ids_of_rules()
        for ids, people in new.of.items():
            for person, grade in people.items():
                if ids not in asked:
                    self.ignored += 1
                elif before.of.get(ids, {}).get(person, math.nan) != grade:
                    self._keep("person", ids, grade, person)

    def _put_known(self, asking: Asking, votes: Votes) -> None:
        """Put in the answers that are there: earlier judgements, those of the judge, and those of people."""
        for pair in self.pairs.irrelevant:
            if (question := asking.number_of.get(pair)) is not None:
                asking.put(question, None, False, free=True)
        if self.options.judge == FILE:
            for ids in votes.of:
                self._put_votes(asking, ids, votes)
        for record in self._of_kind("judge"):
            ids = ids_in(record)
            question = asking.number_of.get(self.pairs.row(*ids))
            if question in self.sample and ids in votes.of:
                asking.put_checked(question, record["grade"], votes.grade(ids), votes.above)
            elif question is not None:
                asking.put(question, record["grade"])
                if self._is_flagged(record, asking.above):
                    self._put_votes(asking, ids, votes)

    def _put_votes(self, asking: Asking, ids: tuple[str, str], votes: Votes) -> None:
        """Put in the answers of people to a pair; none yet means unknown."""
        question = asking.number_of.get(self.pairs.row(*ids))
        if question is not None:
            grade = votes.grade(ids)
            asking.put(question, grade)
            if grade is not None:
                asking.put(question, grade, grade > votes.above)

    def _is_flagged(self, record: Mapping[str, Any], above: float) -> bool:
        """Whether a person has to confirm an answer of the judge."""
        return self.options.confirm and record["grade"] is not None and record["grade"] > above

    def _ask(self, asking: Asking, judge: OfTexts, name: str, votes: Votes) -> list[RowPair]:
        """Ask a judge that is a program; return the pairs whose flags a person has yet to confirm."""
        # While asking, a flagged pair counts as a true negative: the next questions are those needed if people reject
        # the flags. Afterwards it is unknown until they have answered, and bounded both ways.
        for pair in self._to_confirm(asking, votes):
            asking.put(asking.number_of[pair], None, False)
        first = asking.next(self.options.budget)
        self._check_cost(judge, first, self.options.budget - asking.spent)
        if first and not self.options.confirm:
            self.say("The bounds trust every answer of the judge; with --confirm they allow for its errors.")

        def of_pairs(pairs: list[RowPair]) -> Iterator[Grade]:
            for grade in self._answers("judge", judge, name, pairs):
                yield asking.above if self._is_flagged(self.records[-1], asking.above) else grade

        done = self.progress("judging", self.options.budget - asking.spent)
        try:
            asking.ask(of_pairs, self.options.budget, done, self._begun())
        except OverCap as error:  # what is known is still written
            self.say(str(error))
        return self._put_unconfirmed(asking, votes)

    def _answers(self, kind: str, judge: OfTexts, name: str, pairs: list[RowPair]) -> Iterator[Grade]:
        """Yield the judge's answers, each stored on the disk before.

        With the first answer the whole batch is stored, so that a killed run continues with the rest.
        """
        answers = answers_of(judge, [self.pairs.texts(pair) for pair in pairs])
        for number, (pair, grade) in enumerate(zip(pairs, answers, strict=True)):
            if kind == "judge" and not number:
                self._store_batch(pairs)
            self._keep(kind, self.pairs.ids_of(pair), grade, name)
            yield grade

    def _begun(self) -> list[RowPair]:
        """Return the last batch of questions, which may have been answered in part."""
        batches = self._of_kind("batch")
        return [self.pairs.row(*one) for one in batches[-1]["pairs"]] if batches else []

    def _store_batch(self, pairs: list[RowPair]) -> None:
        """Store a batch of questions, unless it is the rest of the last one."""
        if not set(pairs) <= set(self._begun()):
            record = {"kind": "batch", "pairs": [self.pairs.ids_of(one) for one in pairs]}
            self.log.append(record)
            self.records.append(record)

    def _put_unconfirmed(self, asking: Asking, votes: Votes) -> list[RowPair]:
        """Return the pairs whose flags a person has yet to confirm, which are unknown until then."""
        pending = self._to_confirm(asking, votes)
        for pair in pending:
            asking.put(asking.number_of[pair], None)
        return pending

    def _to_confirm(self, asking: Asking, votes: Votes) -> list[RowPair]:
        """Return the pairs whose flags a person has yet to confirm."""
        flagged = (
            self.pairs.row(*ids_in(record))
            for record in self._of_kind("judge")
            if self._is_flagged(record, asking.above) and ids_in(record) not in votes.of
        )
        return [pair for pair in flagged if pair in asking.number_of]

    def _check_cost(self, judge: OfTexts, first: list[RowPair], requests: int) -> None:
        """Say once what an LLM is expected to use, and raise if that exceeds a cap."""
        if not first or self.estimated or not isinstance(judge, LLMJudge):
            return
        self.estimated = True
        estimate: Estimate = judge.estimate([self.pairs.texts(pair) for pair in first], requests)
        cost = (
            f", a cost of about {estimate.cost:.3g}"
            if self.options.asking.price_in or self.options.asking.price_out
            else ""
        )
        self.say(
            f"At most {requests:,} judgements of {self.options.asking.llm}: about {estimate.tokens_in:,} tokens of "
            f"input and {estimate.tokens_out:,} of output{cost}."
        )
        judge.check_cap(estimate)

    def _known_answers(self, votes: Votes) -> list[tuple[RowPair, bool]]:
        """Return the pairs that people have answered, and whether the document is relevant."""
        pairs = [(self.pairs.row(*ids), votes.grade(ids)) for ids in votes.of]
        return [(pair, grade > votes.above) for pair, grade in pairs if grade is not None]

    def _to_calibrate(self, asking: Asking, votes: Votes) -> list[RowPair]:
        """Return pairs that people must answer before a CrossEncoder has a threshold; none once it can be found.

        They are the last ones of the hardest rule. Answers to its first ones decide about it, and would look better
        than others if the threshold were fitted to them.
        """
        if self.options.threshold is not None or self._of_kind("threshold"):
            return []
        answers = self._known_answers(votes)
        if not all(relevant for _, relevant in answers) and (self._positives(1) or any(one for _, one in answers)):
            return []
        answered = {pair for pair, _ in answers}
        candidates = asking.pairs(asking.design.orders[-1][::-1])
        return [pair for pair in dict.fromkeys(candidates) if pair not in answered][:_to_answer]

    def _calibrate(self, judge: OfTexts, votes: Votes) -> None:
        """Find the threshold of a CrossEncoder from answers of people and some known positives, once."""
        if self.options.threshold is not None or self._of_kind("threshold"):
            return
        known = self._known_answers(votes) + [(pair, True) for pair in self._positives(1)]
        scores = np.array([float(one) for one in judge([self.pairs.texts(pair) for pair, _ in known])])
        relevant = np.array([one for _, one in known])
        above = calibrated(scores.tolist(), relevant.tolist())
        self._keep("threshold", ("", ""), above, self.options.judge)
        shares = float((scores[relevant] > above).mean()), float((scores[~relevant] <= above).mean())
        poor = " That is hardly better than chance: use another model, or --confirm." if sum(shares) < 1.2 else ""
        self.say(
            f"Scores above {above:.4g} count as false negatives. Among pairs with known answers this finds "
            f"{shares[0]:.0%} of {relevant.sum()} relevant ones and rejects {shares[1]:.0%} of {(~relevant).sum()} "
            f"irrelevant ones.{poor}"
        )

    def _positives(self, part: int = 0) -> list[RowPair]:
        """Return some known positives.

        Args:
            part: 0 for those that measure the sensitivity, 1 for those that fit a threshold. If both are needed they
                are different pairs, since a threshold fits its own pairs too well.
        """
        number = self.options.num_known
        if not self.options.confirm or self.options.threshold is not None:
            return self.pairs.known(number)
        return self.pairs.known(2 * number)[part::2]

    def _sensitivity(self, judge: OfTexts, name: str) -> Sensitivity:
        """Return the sensitivity of a judge whose flags people confirm, measured on known positives once."""
        known = {self.pairs.row(*ids_in(record)): record["grade"] for record in self._of_kind("known")}
        open_pairs = [pair for pair in self._positives() if pair not in known]
        self._check_cost(judge, open_pairs, len(open_pairs) + self.options.budget)
        above = self._above()
        new = found_among(lambda pairs: self._answers("known", judge, name, pairs), open_pairs, above)
        earlier = sum(grade is not None and grade > above for grade in known.values()), len(known)
        return Sensitivity.of(earlier[0] + new[0], earlier[1] + new[1], 1 - self.options.confidence)

    def _checked(self, asking: Asking, judge: OfTexts, name: str, votes: Votes) -> tuple[Sensitivity, list[RowPair]]:
        """Return the sensitivity on mined pairs that people judge too, and the pairs that wait for their answers."""
        sample = asking.design.sample(self.options.num_mined)
        self.sample = set(sample.tolist())
        questions = sorted(self.sample)
        of = dict(zip(questions, asking.pairs(np.array(questions)), strict=True))
        grades = {self.pairs.row(*ids_in(record)): record["grade"] for record in self._of_kind("judge")}
        open_pairs = [pair for pair in of.values() if pair not in grades]
        self._check_cost(judge, open_pairs, self.options.budget - len(grades))
        grades |= dict(zip(open_pairs, self._answers("judge", judge, name, open_pairs), strict=True))
        pending = [pair for pair in of.values() if self.pairs.ids_of(pair) not in votes.of]
        if pending:
            return Sensitivity(0, 0, 0.0, asking.design.populations[-1].name), pending
        people = {question: votes.grade(self.pairs.ids_of(pair)) for question, pair in of.items()}
        by_judge = {question: grades[pair] for question, pair in of.items()}
        return asking.sensitivity(sample, by_judge, people, votes.above), []

    def _write(self, result: Judged, pending: list[RowPair], votes: Votes) -> None:
        """Write the judgements, the figures, the page, and the sheet of what is open."""
        judgements = self._judgements(result, votes)
        write_atomically(self.folder / "judgements.tsv", lambda file: file.write(judgements.encode()), run_again)
        write_json(
            self.folder / "judge.json",
            {**result.to_dict(), **self._facts(), "people": votes.people(), "kappa": votes.kappa(), **environment()},
            run_again,
        )
        examples = examples_of(result, self.pairs.populations, self.pairs.texts)
        write_page(self.folder / "judge.html", judge_page(result, examples), "judge", overwrite=True)
        rows = [
            SheetRow(self.pairs.ids_of(pair), *self.pairs.texts(pair), self.pairs.example(pair)) for pair in pending
        ]
        if rows or self.options.judge == FILE or self.options.confirm:
            write_sheet(self.folder, rows, "Pairs to judge")

    def _facts(self) -> dict[str, Any]:
        """Return the data and the mining behind the rates."""
        sizes = {"queries": len(self.pairs.problem.queries), "documents": len(self.pairs.problem.corpus)}
        return {**sizes, "k": self.mining.k, "draw": self.mining.draw, "similarity": self.mining.similarity}

    def _judgements(self, result: Judged, votes: Votes) -> str:
        """Return known positives and judged pairs as a table that mine, audit and training read.

        Where people have answered too, they are right. The rates count only the judge: answers that are better at the
        beginning of an order than at its end would break the bounds.
        """
        text = io.StringIO()
        writer = csv.writer(text, delimiter="\t", lineterminator="\n")
        writer.writerow(["query-id", "corpus-id", "score", "grade", "probability", "source"])
        for query, own in enumerate(self.pairs.problem.positives):
            for row in own:
                writer.writerow([*self.pairs.ids_of((query, row)), 1, "", "", "known"])
        for pair in sorted(self.pairs.irrelevant):
            writer.writerow([*self.pairs.ids_of(pair), 0, "", "", "known"])
        for one in result.pairs:
            if one.false_negative is not None and (one.query, one.document) not in self.pairs.irrelevant:
                by_people = votes.grade(self.pairs.ids_of((one.query, one.document)))
                found = one.false_negative if by_people is None else by_people > votes.above
                grade = "" if one.grade is None else f"{one.grade:g}"
                for pair in self.pairs.same_texts((one.query, one.document)):
                    writer.writerow([*self.pairs.ids_of(pair), int(found), grade, f"{one.probability:.6g}", "judged"])
        return text.getvalue()


def ids_in(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ids of a stored pair."""
    return record["query"], record["document"]
