"""The judges that `hardneg judge` offers besides people: a function of texts, a CrossEncoder, and an LLM.

``LLMJudge`` queries a model behind any OpenAI-compatible API, with grades from 0 to 3. Every answer is stored as soon
as it arrives, under the digest of model and prompt, so no stored answer is paid for again: neither after a kill nor
for another pair of the same texts. Failed requests are repeated after growing pauses; an answer without a grade is
requested again, and then counts as unknown. Only the standard library is used.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import random
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np

from hardneg.core.errors import ArgumentError, HardnegError, NoFile, argument_error
from hardneg.io.functions import load_function, names_a_file
from hardneg.io.sealed import digest_of
from hardneg.judging.folder import AnswerLog
from hardneg.judging.options import LLMOptions

TextPair = tuple[str, str]
OfTexts = Callable[[list[TextPair]], Iterable[Any]]
"""[(text of the query, text of the document), ...] -> for each pair a bool, a grade, or None."""


def function_judge(text: str) -> tuple[OfTexts, str]:
    """Return the function that a user has named, and what identifies it: its name and the digest of its file.

    Args:
        text: ``file.py:function`` or ``module:function``.
    """
    function = load_function(text, "judge")
    path = text.rpartition(":")[0] if names_a_file(text) else None
    return function, text if path is None else f"{Path(path).name}:{function.__name__} {digest_of(Path(path))[:16]}"


def calibrated(scores: Sequence[float], relevant: Sequence[bool]) -> float:
    """Return the threshold of scores that agrees best with people, weighing both kinds of pairs equally.

    Args:
        scores: Score of each pair.
        relevant: Whether people found it relevant.

    Raises:
        ArgumentError: Unless there are both kinds.

    Example:
        >>> calibrated([0.1, 0.2, 0.4, 0.9], [False, False, True, True])
        0.3...
    """
    values, yes = np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=bool)
    if not yes.any() or yes.all():
        fix = "answer some pairs of both kinds with --answers, or give --above"
        got = f"{int(yes.sum())} relevant and {int((~yes).sum())} irrelevant pairs"
        raise ArgumentError("judge", "human answers of both kinds to calibrate the scores", got, fix)
    levels = np.unique(values)
    middles = np.concatenate([[levels[0] - 1.0], (levels[:-1] + levels[1:]) / 2])
    quality = [float((values[yes] > cut).mean() + (values[~yes] <= cut).mean()) for cut in middles]
    return float(middles[int(np.argmax(quality))])


def digest_of_text(text: str) -> str:
    """Return a short digest of a text, for the state of a judgement."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


PROMPT = """You judge search results. How well does the document answer the query?

3: it answers the query fully.
2: it answers the query in part.
1: it is about the same subject, but does not answer the query.
0: it has nothing to do with the query.

Query: {query}

Document: {document}

Reply with JSON only, such as {"grade": 0}."""
"""The default prompt; grades 2 and 3 make a negative false."""

_letters_per_token, _tokens_of_answer = 4, 16
_asks, _first_pause, _longest_pause = 3, 0.5, 60.0
_reminder = 'Reply with one grade from 0 to 3, as {"grade": 0}, and nothing else.'
_passing = (408, 409, 425, 429)  # and 5xx: worth another attempt
_json = re.compile(r'"?grade"?\s*[:=]\s*"?([0-3])(?![\d.])', re.IGNORECASE)
_single = re.compile(r"[^\d]*([0-3])[^\d]*")


class Unavailable(HardnegError, OSError):
    """The API does not answer; answers so far are stored."""


class OverCap(ArgumentError):
    """The next request would exceed the cap on tokens or cost; answers so far are stored."""


def grade_in(text: str) -> int | None:
    """Return the grade in an answer, or None if there is none or more than one.

    >>> [grade_in(text) for text in ('{"grade": 2}', "Grade: 1, since", "3", "between 1 and 2", "12")]
    [2, 1, 3, None, None]
    """
    found = set(_json.findall(text))
    if not found and (alone := _single.fullmatch(text)):
        found = {alone[1]}
    return int(found.pop()) if len(found) == 1 else None


def read_prompt(path: str | None) -> str:
    """Return the prompt template in a file, or the default one.

    Raises:
        NoFile: If there is no such file.
        ArgumentError: If it does not contain {query} and {document}.
    """
    if path is None:
        return PROMPT
    if not Path(path).is_file():
        raise NoFile("judge", "a prompt that exists", path)
    text = Path(path).read_text(encoding="utf-8")
    if "{query}" not in text or "{document}" not in text:
        raise ArgumentError("judge", "a prompt with {query} and {document}", path)
    return text


@dataclass(frozen=True)
class Estimate:
    """What a number of requests is expected to use.

    Attributes:
        requests: Number of requests, without those that are answered already.
        tokens_in: Tokens of input, at four letters each.
        tokens_out: Tokens of output.
        cost: Cost at the given prices.
    """

    requests: int
    tokens_in: int
    tokens_out: int
    cost: float


@dataclass(eq=False)
class LLMJudge:
    """Grades of pairs of texts by a large language model.

    Attributes:
        options: Address, model, caps.
        prompt: Template with {query} and {document}.
        log: Where answers are stored, and read from at the start.
        used: Tokens of input and of output so far, in this folder.
    """

    options: LLMOptions
    prompt: str
    log: AnswerLog
    used: list[int] = field(default_factory=lambda: [0, 0])
    _replies: dict[str, list[str]] = field(default_factory=dict)
    _known: dict[str, int | None] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _stop: Event = field(default_factory=Event)
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        url, key = str(self.options.url), os.environ.get(self.options.key_variable, "").strip()
        if not url.startswith(("http://", "https://")):
            raise argument_error("judge", "an address that begins with http:// or https://", "url", url)
        if not (key.isascii() and key.isprintable()):  # later errors would print it
            raise ArgumentError("judge", f"a key of one line in {self.options.key_variable}", "other characters")
        for record in self.log.read():
            self._take(record)

    @property
    def cost(self) -> float:
        """Cost so far, in this folder."""
        return self._cost(*self.used)

    def estimate(self, pairs: Sequence[tuple[str, str]], requests: int) -> Estimate:
        """Return what ``requests`` judgements are expected to use, from the lengths of a sample of pairs.

        Args:
            pairs: Pairs of texts, the next ones for example.
            requests: Number of judgements.
        """
        letters = [len(self._text(pair)) for pair in pairs]
        each = sum(letters) / len(letters) / _letters_per_token if letters else 0.0
        tokens = round(each * requests), _tokens_of_answer * requests
        return Estimate(requests, *tokens, self._cost(*tokens))

    def check_cap(self, estimate: Estimate) -> None:
        """Raise before the start if the estimate exceeds a cap.

        Raises:
            OverCap: With the estimate and the fix.
        """
        cap, total = self.options.max_tokens, sum(self.used) + estimate.tokens_in + estimate.tokens_out
        if cap is not None and total > cap:
            raise OverCap("judge", f"a budget within --max-tokens {cap:,}", f"about {total:,} tokens", _smaller)
        most, cost = self.options.max_cost, self.cost + estimate.cost
        if most is not None and cost > most:
            raise OverCap("judge", f"a budget within --max-cost {most:g}", f"a cost of about {cost:.4g}", _smaller)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> Iterator[float | None]:
        """Return the grade of each pair of texts, in order; None where the model gave none.

        Raises:
            Unavailable: If the API keeps failing.
            ArgumentError: If the API refuses the request.
        """
        self._stop.clear()
        self._failure = None
        workers = ThreadPoolExecutor(self.options.parallel)
        try:
            yield from workers.map(self._grade, self._shared(pairs))
        finally:
            self._stop.set()  # after an error, waiting requests are not sent
            workers.shutdown(wait=True, cancel_futures=True)

    def _shared(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, Event | None, Event]]:
        """Return the text of each request; a request that repeats an earlier one waits for it."""
        first: dict[str, Event] = {}
        found = []
        for pair in pairs:
            text, mine = self._text(pair), Event()
            found.append((text, first.get(text), mine))
            first.setdefault(text, mine)
        return found

    def _grade(self, request: tuple[str, Event | None, Event]) -> float | None:
        text, earlier, done = request
        try:
            while earlier is not None and not earlier.wait(0.1) and not self._stop.is_set():
                pass
            content = hashlib.sha256(json.dumps([self.options.llm, text]).encode()).hexdigest()
            return self._ask(text, content)
        except BaseException as error:  # no further request is sent, and all that wait raise this error
            self._failure = self._failure or error
            self._stop.set()
            raise
        finally:
            done.set()

    def _ask(self, text: str, content: str) -> int | None:
        """Ask until there is a grade, at most three times; every reply is stored before the next request."""
        question = {"role": "user", "content": text}
        while content not in self._known:
            messages = [question]
            if replies := self._replies.get(content):
                messages += [{"role": "assistant", "content": replies[-1]}, {"role": "user", "content": _reminder}]
            answer, tokens = self._request(messages)
            record = {"content": content, "grade": grade_in(answer), "answer": answer[:500], "tokens": tokens}
            self.log.append(record)
            self._take(record)
        return self._known[content]

    def _take(self, record: dict[str, Any]) -> None:
        """Take in a stored reply; a pair is known after a grade, or after the last attempt."""
        with self._lock:
            self.used[0] += record["tokens"][0]
            self.used[1] += record["tokens"][1]
            replies = self._replies.setdefault(record["content"], [])
            replies.append(record["answer"])
            if record["grade"] is not None or len(replies) == _asks:
                self._known[record["content"]] = record["grade"]

    def _request(self, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        """Send one request, with pauses and further attempts while the API fails in passing."""
        failure = ""
        for attempt in range(self.options.attempts):
            if self._stop.is_set():
                raise self._failure or Unavailable("judge", "to go on", "a stop")
            self._check_used(sum(len(one["content"]) for one in messages))
            wait = min(_first_pause * 2**attempt, _longest_pause) * (0.5 + random.random() / 2)
            try:
                return self._send(messages)
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code} {error.reason}"
                if error.code not in _passing and error.code < 500:
                    details = " ".join(error.read(300).decode("utf-8", "replace").split())
                    fix = "check --url, --llm and the key in the environment"
                    raise ArgumentError(
                        "judge", f"an answer of {self.options.url}", f"{failure}: {details}", fix
                    ) from None
                wait = max(wait, _seconds(error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
                failure = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if attempt + 1 < self.options.attempts:
                self._stop.wait(wait)
        fix = "answers so far are stored: run the same command again"
        what = f"an answer of {self.options.url} after {self.options.attempts} attempts"
        raise Unavailable("judge", what, failure, fix)

    def _send(self, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        """Send one request; return the text of the answer, and tokens of input and output."""
        url = str(self.options.url).rstrip("/")
        url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        body = {"model": self.options.llm, "messages": messages, "temperature": 0}
        content = json.dumps(body).encode()
        # An API that knows this header does not charge a second time for a request that a kill cut off.
        headers = {"Content-Type": "application/json", "Idempotency-Key": hashlib.sha256(content).hexdigest()}
        if key := os.environ.get(self.options.key_variable, "").strip():
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, content, headers)
        with _opener.open(request, timeout=self.options.patience) as reply:
            answer = json.loads(reply.read(1 << 22))
        text = answer["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise ValueError("the answer has no text")
        used = answer.get("usage") or {}
        letters = sum(len(one["content"]) for one in messages), len(text)
        names = ("prompt_tokens", "completion_tokens")
        tokens = [used.get(name) for name in names]
        rough = [-(-number // _letters_per_token) for number in letters]
        return text, [given if isinstance(given, int) else own for given, own in zip(tokens, rough, strict=True)]

    def _check_used(self, letters: int) -> None:
        """Raise if one more request would exceed a cap."""
        self.check_cap(
            Estimate(1, tokens := -(-letters // _letters_per_token), _tokens_of_answer, self._cost(tokens, 16))
        )

    def _text(self, pair: tuple[str, str]) -> str:
        """Return the prompt of a pair; braces in the texts have no effect."""
        query, document = pair
        filled = re.split(r"(\{query\}|\{document\})", self.prompt)
        return "".join({"{query}": query, "{document}": document}.get(piece, piece) for piece in filled)

    def _cost(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.options.price_in + tokens_out * self.options.price_out) / 1e6


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treat a redirection as an error: the key must not go to another host."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        """Return None, which means no further request."""


_opener = urllib.request.build_opener(_NoRedirects)
_smaller = "use a smaller --budget, or raise the cap"


def _seconds(header: Any) -> float:
    """Return the seconds of a Retry-After header, at most a minute; 0 if it has none."""
    try:
        return min(max(float(header), 0.0), _longest_pause)
    except (TypeError, ValueError):
        return 0.0
