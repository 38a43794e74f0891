"""`hardneg judge` with functions and people: rounds, answers, kills, changed inputs, and what flows on."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.cli.flags import flags_of
from hardneg.core.errors import ArgumentError, Damaged, DataChanged, FileError, InUse, NoFile
from hardneg.io.files import locked
from hardneg.io.tables import read_table
from hardneg.judging import job
from hardneg.judging.folder import AnswerLog
from hardneg.judging.judges import calibrated
from hardneg.judging.options import JudgeOptions
from hardneg.mining.inputs import quiet
from hardneg.mining.judgements import read_grades
from hardneg.mining.options import MineOptions
from judging.conftest import MakeOptions, answers

FUNCTION = "judging.conftest:judge"


def fill_in(sheet: Path, out: Path, name: str = "ada", wrong: tuple[str, ...] = ()) -> int:
    """Answers a sheet as a person would, except for the queries in ``wrong``."""
    with sheet.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row |= {"grade": str(int(answers(row["query"], row["document"]) != (row["query-id"] in wrong))), "by": name}
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def table(folder: Path) -> dict[tuple[str, str], str]:
    rows = read_table(folder / "judgements.tsv")
    return dict(zip(zip(rows["query-id"], rows["corpus-id"], strict=True), rows["score"], strict=True))


def test_a_function_judges_everything_once(options: MakeOptions, tmp_path: Path, texts: dict[str, str]) -> None:
    first = job.run(options(judge=FUNCTION))
    assert first.waiting == 0
    assert 0 < first.result.spent <= 150
    found = table(tmp_path / "judged")
    judged = AnswerLog(tmp_path / "judged" / "answers.jsonl").read()
    given = [record for record in judged if record["kind"] == "judge"]
    assert len(given) == first.result.spent
    for record in given:
        expected = answers(texts[record["query"]], texts[record["document"]])
        assert int(found[record["query"], record["document"]]) == expected
    again = job.run(options(judge=FUNCTION))
    assert AnswerLog(tmp_path / "judged" / "answers.jsonl").read() == judged, "nothing is asked twice"
    assert again.result.rates == first.result.rates
    more = job.run(options(judge=FUNCTION, budget=10**6))
    assert more.result.exact
    assert more.result.spent > first.result.spent
    page = (tmp_path / "judged" / "judge.html").read_text()
    assert re.findall("<script[^>]*>.{9}", page) == ["<script>// Sorts "]  # the script of all pages
    figures = json.loads((tmp_path / "judged" / "judge.json").read_text())
    assert [row["rule"] for row in figures["rules"]] == list(more.result.rates)


def test_found_answers_become_positives_and_flow_on(options: MakeOptions, tmp_path: Path) -> None:
    first = job.run(options(judge=FUNCTION, budget=10**6))
    path = tmp_path / "judged" / "judgements.tsv"
    found = {(query, document) for grade, query, document in read_grades(str(path)) if grade > 0}
    given = {(f"q{i}", f"d{j}") for i in range(60) for j in (i, i + 20)[: 1 + i % 2]}
    assert given < found
    arguments = [str(tmp_path / "queries.jsonl"), "--corpus", str(tmp_path / "corpus.jsonl"), "--judgements", str(path)]
    encoder = ["--encoder", "support.mining_jobs:encode", "--cache-key", "1", "-k", "3", "--format", "ids"]
    done = CliRunner().invoke(
        app, ["mine", *arguments, *encoder, "-n", "Rank(0, 8)", "-o", str(tmp_path / "mined.jsonl")]
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    pairs = {(row["query_id"], negative) for row in rows for negative in row["negative_ids"]}
    assert len(pairs) > 100
    assert not pairs & found
    # Judging again with these judgements asks nobody about what is known.
    again = job.run(options({"judgements": str(path), "out": str(tmp_path / "again")}, judge=FUNCTION, budget=10**6))
    records = AnswerLog(tmp_path / "again" / "answers.jsonl").read()
    asked = {(record["query"], record["document"]) for record in records if record["kind"] == "judge"}
    assert not asked & set(table(tmp_path / "judged"))
    assert again.result.spent < first.result.spent


def test_people_answer_in_rounds(options: MakeOptions, tmp_path: Path) -> None:
    folder = tmp_path / "judged"
    direct = job.run(options({"out": str(tmp_path / "direct")}, judge=FUNCTION))
    outcome, rounds = job.run(options()), 0
    while outcome.waiting:
        assert fill_in(folder / "sheet.csv", tmp_path / "answers.csv") == outcome.waiting
        outcome = job.run(options(answers=(str(tmp_path / "answers.csv"),)))
        rounds += 1
        assert rounds < 20
    assert outcome.people == ["ada"]
    assert job.run(options()).waiting == 0, "the sheet has no rows now"
    assert outcome.result.rates == direct.result.rates
    assert table(folder) == table(tmp_path / "direct")
    assert outcome.result.spent == direct.result.spent


def test_sheets_that_are_answered_in_part_end_with_the_same_file(options: MakeOptions, tmp_path: Path) -> None:
    """Seven pairs at a time, of which some are left open, also after the design has given up a sequence."""
    folder = tmp_path / "judged"
    direct = job.run(options({"out": str(tmp_path / "direct")}, judge=FUNCTION, budget=100))
    outcome, rounds = job.run(options(sheet=7, budget=100)), 0
    while outcome.waiting:
        fill_in(folder / "sheet.csv", folder / "sheet.csv")
        lines = (folder / "sheet.csv").read_bytes().splitlines(keepends=True)
        (folder / "sheet.csv").write_bytes(b"".join(lines[: 1 + max(1, len(lines) - 3)]))
        outcome = job.run(options(sheet=7, budget=100))
        rounds += 1
        assert rounds < 40
    assert table(folder) == table(tmp_path / "direct")
    assert outcome.result.rates == direct.result.rates


def test_answers_are_found_in_the_sheet_and_in_the_folder(options: MakeOptions, tmp_path: Path) -> None:
    folder = tmp_path / "judged"
    waiting = job.run(options(sheet=10)).waiting
    assert waiting == 10
    fill_in(folder / "sheet.csv", folder / "sheet.csv")
    assert job.run(options(sheet=10)).result.spent == 10
    (folder / "answers").mkdir()
    fill_in(folder / "sheet.csv", folder / "answers" / "more.csv")
    assert job.run(options(sheet=10)).result.spent == 18, "the rest of the first pairs of each rule"
    assert job.run(options(sheet=10)).result.spent == 18


def test_several_people_and_their_agreement(options: MakeOptions, tmp_path: Path) -> None:
    job.run(options())
    sheet, files = tmp_path / "judged" / "sheet.csv", [tmp_path / f"{name}.csv" for name in ("ada", "bob", "eve")]
    ids = [row["query-id"] for row in csv.DictReader(sheet.open())]
    for path, wrong in zip(files, ((), (), tuple(ids[:3])), strict=True):
        fill_in(sheet, path, path.stem, wrong)
    outcome = job.run(options(answers=tuple(map(str, files))))
    assert outcome.people == ["ada", "bob", "eve"]
    assert 0 < outcome.kappa < 1 or outcome.kappa < 0
    records = AnswerLog(tmp_path / "judged" / "answers.jsonl").read()
    record = {(one["query"], one["document"]) for one in records if one["kind"] == "person"}
    assert len(record) == len(ids)
    texts = {
        row["id"]: row.get("text") or row.get("query")
        for name in ("queries", "corpus")
        for row in map(json.loads, (tmp_path / f"{name}.jsonl").open())
    }
    for pair, score in table(tmp_path / "judged").items():
        if pair in record:
            assert int(score) == answers(texts[pair[0]], texts[pair[1]]), "the majority decides"


def test_a_tie_and_a_question_mark_are_unknown(options: MakeOptions, tmp_path: Path) -> None:
    job.run(options())
    rows = list(csv.DictReader((tmp_path / "judged" / "sheet.csv").open()))
    lines = ["query-id,corpus-id,grade,by"]
    lines += [f"{rows[0]['query-id']},{rows[0]['corpus-id']},{grade},{by}" for grade, by in (("yes", "a"), ("no", "b"))]
    lines += [f"{rows[1]['query-id']},{rows[1]['corpus-id']},?,a"]
    (tmp_path / "odd.csv").write_text("\n".join(lines) + "\n")
    result = job.run(options(answers=(str(tmp_path / "odd.csv"),))).result
    assert [pair.false_negative for pair in result.pairs] == [None, None]
    assert result.spent == 2


def test_answers_for_pairs_that_were_not_asked_are_reported_and_ignored(options: MakeOptions, tmp_path: Path) -> None:
    (tmp_path / "foreign.csv").write_text("query-id,corpus-id,grade\nq0,d0,1\nnobody,nothing,0\nq0,d1,\n")
    outcome = job.run(options(answers=(str(tmp_path / "foreign.csv"),)))
    assert outcome.ignored == 2
    assert outcome.result.spent == 0


@pytest.mark.parametrize("grade", ["perhaps", "1e400", "nan2", "--"])
def test_grades_that_cannot_be_read_are_refused(grade: str, options: MakeOptions, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(f"query-id,corpus-id,grade\nq0,d5,{grade}\n")
    with pytest.raises(ArgumentError, match="line 2"):
        job.run(options(answers=(str(tmp_path / "bad.csv"),)))
    (tmp_path / "bad.csv").write_text("question,answer\nq0,1\n")
    with pytest.raises(ArgumentError):
        job.run(options(answers=(str(tmp_path / "bad.csv"),)))


def test_changed_inputs_are_refused(options: MakeOptions, tmp_path: Path) -> None:
    job.run(options(judge=FUNCTION))
    for change in (
        {"false_negatives": 0.1},
        {"rules": ("Rank(0, 8)",)},
        {"confidence": 0.9},
        {"above": 0.5},
        {"mining": {"k": 2}},
        {"mining": {"seed": 1}},
        {"judge": "file"},
    ):
        with pytest.raises(DataChanged):
            job.run(options(**{"judge": FUNCTION, **change}))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("cat", "cow", 1))
    with pytest.raises(DataChanged) as caught:
        job.run(options(judge=FUNCTION))
    assert "corpus" in caught.value.got


def test_a_second_process_is_refused(options: MakeOptions, tmp_path: Path) -> None:
    (tmp_path / "judged").mkdir()
    with locked(tmp_path / "judged" / ".lock", "test"), pytest.raises(InUse):
        job.run(options(judge=FUNCTION))


def test_files_of_others_and_inputs_are_not_overwritten(options: MakeOptions, tmp_path: Path) -> None:
    folder = tmp_path / "judged"
    folder.mkdir()
    (folder / "judge.json").write_text("mine")
    with pytest.raises(FileError):
        job.run(options(judge=FUNCTION))
    (folder / "judge.json").unlink()
    job.run(options(judge=FUNCTION))
    with pytest.raises(FileError):
        job.run(options({"judgements": str(folder / "judgements.tsv")}, judge=FUNCTION))


def test_flags_are_those_of_mine() -> None:
    ours, theirs = flags_of(JudgeOptions), flags_of(MineOptions)
    assert len(ours.keys() & theirs.keys()) > 35
    shared = ours.keys() & theirs.keys() - {"resume"}  # judge continues by itself
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert ours["rules"] == theirs["negatives"]


def test_resume_needs_something_to_resume(options: MakeOptions) -> None:
    with pytest.raises(NoFile):
        job.run(options(judge=FUNCTION, resume=True))
    first = job.run(options(judge=FUNCTION))
    assert job.run(options(judge=FUNCTION, resume=True)).result.rates == first.result.rates


def test_a_line_that_a_kill_cut_off_is_dropped_and_damage_is_found(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    records = [{"kind": "judge", "query": "ä", "document": f"d{i}", "grade": i / 2, "by": "x"} for i in range(3)]
    for record in records:
        log.append(record)
    content = log.path.read_bytes()
    for cut in range(1, len(content.split(b"\n")[2])):
        log.path.write_bytes(content[: -cut - 1])
        assert log.read() == records[:2]
        log.append(records[2])
        assert log.read() == records
    for place in range(0, len(content), 7):
        log.path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert log.read() in (records, records[:2])  # a newline or the name of the checksum
        except Damaged:
            continue


SLOW = """
import os, time
def judge(pairs):
    for query, document in pairs:
        with open({path!r}, "a") as file:
            file.write(f"{{query}}\\t{{document}}\\n")
        time.sleep(0.02)
        yield len(set(query.split()) & set(document.split())) >= 3
"""


def test_nothing_is_lost_by_kills(options: MakeOptions, tmp_path: Path) -> None:
    """The process is killed again and again in mid-judging; at most the answer in flight is asked a second time."""
    asked, script = tmp_path / "asked.txt", tmp_path / "slow.py"
    script.write_text(SLOW.format(path=str(asked)))
    direct = job.run(options({"out": str(tmp_path / "direct")}, judge=FUNCTION, budget=60))
    command = [
        sys.executable, "-m", "hardneg", "judge", str(tmp_path / "queries.jsonl"),
        "--corpus", str(tmp_path / "corpus.jsonl"),
        "--encoder", "support.mining_jobs:encode", "--cache-key", "1", "-k", "3", "--budget", "60",
        "--false-negatives", "0.2", "--judge", f"{script}:judge", "-o", str(tmp_path / "judged"),
        *(part for rule in options().rules for part in ("-n", rule)),
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    log, kills = tmp_path / "judged" / "answers.jsonl", 0
    for lines in (5, 20, 40):
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 90
        while time.monotonic() < until and process.poll() is None:
            if log.exists() and log.read_bytes().count(b"\n") >= lines:
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        process.wait()
    assert kills == 3
    assert subprocess.run(command, env=environ, stdout=subprocess.DEVNULL).returncode == 0
    assert table(tmp_path / "judged") == table(tmp_path / "direct")
    assert len(asked.read_text().splitlines()) <= direct.result.spent + kills


@pytest.mark.parametrize("budget", [60, 100, 150])
def test_a_run_that_was_killed_asks_the_same_pairs(budget: int, options: MakeOptions, tmp_path: Path) -> None:
    """Killed after any answer, also after the design has given up a sequence and takes the rules in turn."""
    job.run(options(judge=FUNCTION, budget=budget))
    folder = tmp_path / "judged"
    log = folder / "answers.jsonl"
    expected, lines = (folder / "judgements.tsv").read_bytes(), log.read_bytes().splitlines(keepends=True)
    for cut in range(1, len(lines), 4):
        log.write_bytes(b"".join(lines[:cut]))
        job.run(options(judge=FUNCTION, budget=budget))
        assert (folder / "judgements.tsv").read_bytes() == expected, cut
        assert len(log.read_bytes().splitlines()) <= len(lines) + 1, "the rest of a batch is a batch again"


def test_people_confirm_what_a_judge_flags(options: MakeOptions, tmp_path: Path) -> None:
    script = tmp_path / "hasty.py"
    script.write_text("def judge(pairs):\n    return [len(set(q.split()) & set(d.split())) >= 2 for q, d in pairs]\n")
    change: dict[str, Any] = {"judge": f"{script}:judge", "confirm": True, "num_known": 40, "false_negatives": 0.3}
    outcome = job.run(options(**change))
    found, tried, low = outcome.result.sensitivity
    assert tried == 40
    assert 0.5 < low < found / tried < 1, "the second positive of a query has nothing to do with it"
    assert outcome.waiting > 0
    unconfirmed = outcome.result.rates
    for _ in range(5):
        if not outcome.waiting:
            break
        fill_in(tmp_path / "judged" / "sheet.csv", tmp_path / "answers.csv")
        outcome = job.run(options(**change, answers=(str(tmp_path / "answers.csv"),)))
    assert outcome.waiting == 0
    assert outcome.result.confirmations > 0
    for rule, (_, low, high) in outcome.result.rates.items():
        assert high <= unconfirmed[rule][2]
        assert low <= high
    exact = job.run(options({"out": str(tmp_path / "exact")}, judge=FUNCTION, budget=10**6)).result
    assert all(low <= exact.rates[rule][0] <= high for rule, (_, low, high) in outcome.result.rates.items())


def test_people_judge_a_sample_of_mined_pairs_first(
    options: MakeOptions, tmp_path: Path, texts: dict[str, str]
) -> None:
    """The judge misses answers of exactly three words, which people find in the sample. It is asked first."""
    script = tmp_path / "strict.py"
    script.write_text("def judge(pairs):\n    return [len(set(q.split()) & set(d.split())) >= 4 for q, d in pairs]\n")
    change: dict[str, Any] = {"judge": f"{script}:judge", "confirm": True, "num_mined": 60, "false_negatives": 0.3}
    outcome = job.run(options(**change))
    assert outcome.waiting == 60
    assert outcome.result.spent == 60
    assert outcome.result.chosen is None
    assert all(pair.false_negative is not True for pair in outcome.result.pairs), "nothing is confirmed"
    with pytest.raises(DataChanged):
        job.run(options(**change | {"num_mined": 70}))
    sample = fill_in(tmp_path / "judged" / "sheet.csv", tmp_path / "answers.csv")
    assert sample == 60
    asked = [(row["query-id"], row["corpus-id"]) for row in csv.DictReader((tmp_path / "answers.csv").open())]
    for _ in range(6):
        outcome = job.run(options(**change, answers=(str(tmp_path / "answers.csv"),)))
        if not outcome.waiting:
            break
        fill_in(tmp_path / "judged" / "sheet.csv", tmp_path / "answers.csv")
    assert outcome.waiting == 0
    found, tried, _ = outcome.result.sensitivity
    words = {pair: len(set(texts[pair[0]].split()) & set(texts[pair[1]].split())) for pair in asked}
    assert tried == sum(number >= 3 for number in words.values())
    assert found == sum(number >= 4 for number in words.values())
    assert 0 < found < tried
    scores = table(tmp_path / "judged")
    assert all(int(scores[pair]) == (number >= 3) for pair, number in words.items()), "what people found is kept"
    figures = json.loads((tmp_path / "judged" / "judge.json").read_text())
    assert figures["sensitivity_measured_on"] == "Rank(stop=8)"
    assert figures["confirmations"] >= 60
    exact = job.run(options({"out": str(tmp_path / "exact")}, judge=FUNCTION, budget=10**6)).result
    assert all(low <= exact.rates[rule][0] <= high for rule, (_, low, high) in outcome.result.rates.items())


def test_a_threshold_is_fitted_to_other_positives_than_the_sensitivity(options: MakeOptions, tmp_path: Path) -> None:
    given = options(judge="cross-encoder:mine", confirm=True, num_known=30)
    one = job.Round(given, given.mine_options(), tmp_path, quiet, print)
    assert len(one._positives(0)) == len(one._positives(1)) == 30
    assert not set(one._positives(0)) & set(one._positives(1))


def test_scores_are_calibrated_on_answers_of_people(
    options: MakeOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cross-encoder whose scores are right above 30: half-way between known answers."""
    score = lambda pairs: [10.0 * len(set(q.split()) & set(d.split())) for q, d in pairs]  # noqa: E731
    monkeypatch.setattr(job, "pair_scorer", lambda *_: score)
    asked = job.run(options(judge="cross-encoder:mine"))  # only positives are known
    assert (asked.waiting, asked.result.spent) == (20, 0)
    fill_in(tmp_path / "judged" / "sheet.csv", tmp_path / "answers.csv")
    some = (str(tmp_path / "answers.csv"),)
    found = job.run(options(judge="cross-encoder:mine", answers=some, budget=10**6))
    exact = job.run(options({"out": str(tmp_path / "exact")}, judge=FUNCTION, budget=10**6))
    assert found.result.rates == exact.result.rates
    assert calibrated([3.0, 1.0, 2.0], [True, False, False]) == 2.5


@pytest.mark.parametrize(
    "change",
    [
        {"judge": "me"},
        {"judge": "llm"},
        {"confirm": True},
        {"num_mined": 10},
        {"num_mined": 200, "confirm": True, "judge": FUNCTION},
        {"false_negatives": 1.0},
        {"confidence": 0.0},
        {"budget": 0},
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], options: MakeOptions) -> None:
    with pytest.raises(ArgumentError):
        options(**change)


def test_embeddings_without_texts_are_judged_by_id(options: MakeOptions, tmp_path: Path) -> None:
    import numpy as np

    random = np.random.default_rng(0)
    np.save(tmp_path / "v.npy", random.standard_normal((40, 8)).astype(np.float32))
    (tmp_path / "qrels.csv").write_text("query_id,doc_id\n" + "".join(f"{i},{(i + 1) % 40}\n" for i in range(40)))
    (tmp_path / "by_id.py").write_text("def judge(pairs):\n    return [int(q) % 5 == int(d) % 5 for q, d in pairs]\n")
    mining = {
        "queries": str(tmp_path / "v.npy"), "corpus": None, "corpus_embeddings": str(tmp_path / "v.npy"),
        "judgements": str(tmp_path / "qrels.csv"), "encoder": None, "cache_key": None,
    }  # fmt: skip
    found = job.run(options(mining, judge=f"{tmp_path / 'by_id.py'}:judge", budget=10**6))
    assert found.result.exact
    for pair in found.result.pairs:
        assert pair.false_negative == (pair.query % 5 == pair.document % 5)


def test_the_terminal_shows_rates_and_what_to_do_next(options: MakeOptions, tmp_path: Path) -> None:
    given = options().mining
    arguments = [
        "judge",
        given.queries,
        "--corpus",
        given.corpus,
        "--encoder",
        given.encoder,
        "--cache-key",
        "1",
        "-k",
        "3",
    ]
    done = CliRunner().invoke(app, [*arguments, "-o", given.out, "--budget", "50"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "sheet.html" in done.output
    assert re.search(r"BelowPositive\(relative=0\.05\)", done.output)
    fill_in(tmp_path / "judged" / "sheet.csv", tmp_path / "answers.csv")
    more = ["-o", given.out, "--budget", "50", "--answers", str(tmp_path / "answers.csv")]
    assert CliRunner().invoke(app, [*arguments, *more]).exit_code == 0
    wrong = CliRunner().invoke(app, [*arguments, *more, "--seed", "3"])
    assert wrong.exit_code == 2
    assert "--out" in wrong.output
    assert MineOptions.__name__ not in wrong.output
