"""The LLM judge against a local server: failures, malformed answers, caps, kills; nothing is paid for twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardneg.core.errors import ArgumentError, DataChanged, NoFile
from hardneg.judging import job, judges
from hardneg.judging.folder import AnswerLog
from hardneg.judging.judges import LLMJudge, OverCap, Unavailable, grade_in, read_prompt
from hardneg.judging.options import LLMOptions
from judging.conftest import MakeOptions
from judging.llm_server import Server, serving
from judging.test_judge_files import FUNCTION, table


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(judges, "_first_pause", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving() as one:
        yield one


def asking(server: Server, **more: Any) -> LLMOptions:
    return LLMOptions(**{"url": server.url, "llm": "tiny", "patience": 0.5, **more})


def judge_of(server: Server, path: Path, **more: Any) -> LLMJudge:
    return LLMJudge(asking(server, **more), read_prompt(None), AnswerLog(path / "llm.jsonl"))


PAIRS = [(f"a b c {i}", f"a {'b' if i % 3 == 0 else 'x'} {i}") for i in range(12)]
GRADES = [3.0 if i % 3 == 0 else 1.0 for i in range(12)]


def test_grades_in_order_in_spite_of_every_failure(server: Server, tmp_path: Path) -> None:
    server.plan = dict(enumerate(["429", "500", "hang", "garbage", "empty", "cut", "chat", "503", "429", "chat"]))
    judge = judge_of(server, tmp_path, attempts=8)
    assert list(judge(PAIRS)) == GRADES
    assert set(server.asked) == set(server.paid)
    stored = AnswerLog(tmp_path / "llm.jsonl").read()
    assert len(stored) == len(PAIRS) + 2, "two replies had no grade"
    assert sum(record["tokens"][1] for record in stored) >= 6 * len(PAIRS)
    asked = len(server.asked)
    assert list(judge_of(server, tmp_path)(PAIRS)) == GRADES
    assert len(server.asked) == asked, "all answers were stored"


def test_pairs_of_the_same_texts_are_asked_once(server: Server, tmp_path: Path) -> None:
    assert list(judge_of(server, tmp_path)([PAIRS[0]] * 5 + [PAIRS[1]] * 5)) == [3.0] * 5 + [1.0] * 5
    assert len(server.asked) == 2


def test_an_answer_without_a_grade_is_unknown_after_three_attempts(server: Server, tmp_path: Path) -> None:
    server.never = (PAIRS[0][1],)
    assert list(judge_of(server, tmp_path)(PAIRS[:3])) == [None, 1.0, 1.0]
    assert Counter(server.asked)[judges.PROMPT.replace("{query}", PAIRS[0][0]).replace("{document}", PAIRS[0][1])] == 3


def test_replies_without_a_grade_are_not_paid_for_twice(server: Server, tmp_path: Path) -> None:
    """A conversation that a kill cuts off goes on where it was."""
    server.never = (PAIRS[0][1],)
    assert list(judge_of(server, tmp_path)(PAIRS[:1])) == [None]
    log = tmp_path / "llm.jsonl"
    replies = log.read_bytes().splitlines(keepends=True)
    for cut in (1, 2):
        log.write_bytes(b"".join(replies[:cut]))
        asked = len(server.asked)
        judge = judge_of(server, tmp_path)
        assert list(judge(PAIRS[:1])) == [None]
        assert len(server.asked) - asked == 3 - cut
        assert judge.used == [sum(record["tokens"][side] for record in AnswerLog(log).read()) for side in (0, 1)]


def test_an_api_that_keeps_failing_raises_and_loses_nothing(server: Server, tmp_path: Path) -> None:
    server.plan = dict.fromkeys(range(4, 1000), "500")
    judge = judge_of(server, tmp_path, parallel=1, attempts=2)
    with pytest.raises(Unavailable):
        list(judge(PAIRS))
    assert len(AnswerLog(tmp_path / "llm.jsonl").read()) == 4
    server.plan = {}
    assert list(judge_of(server, tmp_path)(PAIRS)) == GRADES
    assert Counter(server.paid).most_common(1)[0][1] == 1


def test_a_refused_request_raises_at_once(server: Server, tmp_path: Path) -> None:
    server.plan = dict.fromkeys(range(1000), "401")
    with pytest.raises(ArgumentError, match="401"):
        list(judge_of(server, tmp_path, parallel=1)(PAIRS))
    assert len(server.asked) == 1


def test_a_redirection_is_not_followed(server: Server, tmp_path: Path) -> None:
    server.plan = {0: "302"}
    with pytest.raises(ArgumentError, match="302"):
        list(judge_of(server, tmp_path, parallel=1)(PAIRS[:1]))
    assert len(server.asked) == 1


def test_the_key_comes_from_the_environment_and_is_stored_nowhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: MakeOptions
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-1234\n")
    job.run(options(judge="llm", asking=asking(server, key_variable="MY_KEY"), budget=20))
    assert set(server.keys) == {"Bearer secret-1234"}
    for path in (tmp_path / "judged").rglob("*"):
        assert path.is_dir() or b"secret-1234" not in path.read_bytes()
    monkeypatch.setenv("MY_KEY", "two\nlines")
    with pytest.raises(ArgumentError) as caught:
        judge_of(server, tmp_path, key_variable="MY_KEY")
    assert "two" not in str(caught.value)


def test_an_estimate_comes_first_and_caps_hold(server: Server, tmp_path: Path) -> None:
    judge = judge_of(server, tmp_path, price_in=2.0, price_out=10.0)
    estimate = judge.estimate(PAIRS, 100)
    assert estimate.requests == 100
    assert estimate.cost == pytest.approx((2 * estimate.tokens_in + 10 * estimate.tokens_out) / 1e6)
    list(judge(PAIRS))
    assert judge.used[0] == sum(len(prompt) // 4 for prompt in server.paid)
    assert judge.used[0] == pytest.approx(estimate.tokens_in * 12 / 100, rel=0.1)
    for cap in ({"max_tokens": 500}, {"max_cost": 1e-4, "price_in": 1.0}):
        folder = tmp_path / next(iter(cap))
        folder.mkdir()
        limited = judge_of(server, folder, parallel=1, **cap)
        with pytest.raises(OverCap):
            limited.check_cap(limited.estimate(PAIRS, 100))
        asked = len(server.asked)
        with pytest.raises(OverCap):
            list(limited(PAIRS))
        assert 0 < len(server.asked) - asked < 12
        if limited.options.max_tokens:
            assert sum(limited.used) <= limited.options.max_tokens
        else:
            assert limited.cost <= limited.options.max_cost


def test_what_is_known_at_a_cap_is_written(server: Server, options: MakeOptions, tmp_path: Path) -> None:
    given = options(judge="llm", asking=asking(server, max_tokens=2000, parallel=1), budget=12)
    server.plan = dict.fromkeys(range(3, 1000), "chat")  # answers without a grade cost three times as much
    said: list[str] = []
    outcome = job.run(given, say=said.append)
    assert 0 < outcome.result.spent < 12
    assert any("--max-tokens" in line for line in said)
    assert (tmp_path / "judged" / "judge.json").exists()
    assert "{query}" in (tmp_path / "judged" / "prompt.txt").read_text()
    with pytest.raises(OverCap):
        job.run(options(judge="llm", asking=asking(server, max_tokens=2000), budget=12))


@pytest.mark.parametrize("num_mined", [0, 15])
def test_the_estimate_comes_before_the_pairs_that_measure_the_sensitivity(
    num_mined: int, server: Server, options: MakeOptions, tmp_path: Path
) -> None:
    change = {"judge": "llm", "confirm": True, "num_known": 10, "num_mined": num_mined, "budget": 30}
    said: list[tuple[str, int]] = []
    job.run(options(**change, asking=asking(server)), say=lambda line: said.append((line, len(server.asked))))
    ((line, before),) = [one for one in said if "tokens of" in one[0]]
    assert before == 0
    assert f"At most {40 if not num_mined else 30} judgements" in line
    assert len(server.asked) >= (num_mined or 10)
    asked = len(server.asked)
    capped = options({"out": str(tmp_path / "capped")}, **change, asking=asking(server, max_tokens=100))
    with pytest.raises(OverCap):
        job.run(capped)
    assert len(server.asked) == asked


def test_the_same_file_as_from_a_sheet_or_a_function(server: Server, options: MakeOptions, tmp_path: Path) -> None:
    """With failures in between; every judgement is paid for once."""
    direct = job.run(options({"out": str(tmp_path / "direct")}, judge=FUNCTION))
    server.plan = {2: "429", 5: "hang", 6: "garbage", 9: "chat", **dict.fromkeys(range(20, 40), "500")}
    given = options(judge="llm", asking=asking(server, attempts=4))
    with pytest.raises(Unavailable):
        job.run(given)
    server.plan = {}
    said: list[str] = []
    outcome = job.run(replace(given, asking=asking(server, parallel=8)), say=said.append)
    assert outcome.result.rates == direct.result.rates
    found, expected = table(tmp_path / "judged"), table(tmp_path / "direct")
    assert found == expected
    twice = {prompt: times for prompt, times in Counter(server.paid).items() if times > 1}
    assert len(twice) <= 2, "only the answer without a grade, and the one that came too late"
    assert any("tokens" in line for line in said)
    assert {pair.grade for pair in outcome.result.pairs} == {1.0, 3.0}


def test_nothing_is_paid_for_twice_after_kills(server: Server, options: MakeOptions, tmp_path: Path) -> None:
    server.delay = 0.02
    direct = job.run(options({"out": str(tmp_path / "direct")}, judge=FUNCTION, budget=60))
    command = [
        sys.executable, "-m", "hardneg", "judge", str(tmp_path / "queries.jsonl"),
        "--corpus", str(tmp_path / "corpus.jsonl"), "--encoder", "support.mining_jobs:encode", "--cache-key", "1",
        "-k", "3", "--budget", "60", "--false-negatives", "0.2", "--judge", "llm", "--url", server.url, "--llm", "tiny",
        "-o", str(tmp_path / "judged"), *(part for rule in options().rules for part in ("-n", rule)),
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    log = tmp_path / "judged" / "llm.jsonl"
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 90
    while time.monotonic() < until and not (log.exists() and log.read_bytes().count(b"\n") >= 15):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert table(tmp_path / "judged") == table(tmp_path / "direct")
    assert len(server.paid) <= direct.result.spent + 4, "at most the four requests in flight are asked again"


def test_the_prompt_can_be_edited_and_must_not_change_in_between(
    server: Server, options: MakeOptions, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Mine. Query: {query}\nDocument: {document}\nHere {braces} stay.")
    given = options(judge="llm", asking=asking(server, prompt=str(prompt)), budget=10)
    job.run(given)
    assert all(text.startswith("Mine. Query: ") and text.endswith("Here {braces} stay.") for text in server.asked)
    prompt.write_text("Other. Query: {query}\nDocument: {document}")
    with pytest.raises(DataChanged):
        job.run(given)
    prompt.write_text("Neither")
    with pytest.raises(ArgumentError):
        read_prompt(str(prompt))
    with pytest.raises(NoFile):
        read_prompt(str(tmp_path / "none.txt"))


def test_braces_in_texts_have_no_effect(server: Server, tmp_path: Path) -> None:
    list(judge_of(server, tmp_path)([("a {document} b", "c {query} {0}")]))
    assert "Query: a {document} b\n" in server.asked[0]
    assert "Document: c {query} {0}\n" in server.asked[0]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/v1", "localhost"])
def test_only_http_is_spoken(url: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        LLMJudge(LLMOptions(url=url, llm="x"), judges.PROMPT, AnswerLog(tmp_path / "llm.jsonl"))


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ('{"grade": 0}', 0), ('```json\n{"grade": 3}\n```', 3), ("2", 2), ("**1**", 1), ("grade=2", 2),
        ('{"Grade":"1"}', 1), ("", None), ("4", None), ("10", None), ('{"grade": 7}', None), ("3 or 2", None),
        ('{"grade": 1} or {"grade": 2}', None),
        ('{"grade": 2.5}', None), ("relevant", None),
    ],
)  # fmt: skip
def test_grades_are_read_strictly(text: str, grade: int | None) -> None:
    assert grade_in(text) == grade
    assert json.dumps(grade_in(text)) in ("null", "0", "1", "2", "3")
