"""The options of `hardneg judge`: the input of `hardneg mine`, the rules, the judge and what to certify.

This module is imported for ``--help``, so it must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from hardneg.core.errors import argument_error, check_among, check_counts, check_range, check_seed
from hardneg.core.options import make_plain, option, part
from hardneg.mining.options import INPUT, RULE, SEARCH, Columns, MineOptions

PROMISE, JUDGE, LLM = "Certification", "Judge", "LLM"
PANELS = (INPUT, RULE, PROMISE, JUDGE, LLM, SEARCH, "Execution")
"""Order of the panels in ``--help``."""

_mining = (
    "queries", "out", "corpus", "judgements", "positive_label", "query_embeddings", "corpus_embeddings",
    "embedding_column", "model", "encoder", "query_prompt", "corpus_prompt", "revision", "dtype", "cache_key",
    "batch_size", "missing_positives", "k", "draw", "seed", "temperature", "similarity", "imports", "near_positive",
    "near_negative", "search", "bm25", "runs", "fusion", "candidates", "query_block", "device", "memory",
)  # fmt: skip
"""Options of mining that `hardneg judge` has too, with the same names."""

FILE, MODEL = "file", "cross-encoder:"


@dataclass(frozen=True)
class LLMOptions:
    """How a large language model is queried."""

    url: str | None = option(None, "Address of an OpenAI-compatible API, such as http://localhost:8000/v1.", LLM)
    llm: str | None = option(None, "Name of the model to request.", LLM)
    key_variable: str = option("OPENAI_API_KEY", "Environment variable that contains the key of the API.", LLM)
    prompt: str | None = option(
        None, "File with a prompt that contains {query} and {document}; OUT/prompt.txt is a copy of the default.", LLM
    )
    parallel: int = option(4, "Number of concurrent requests.", LLM, low=1)
    attempts: int = option(6, "Attempts per request, with increasing pauses in between.", LLM, low=1)
    patience: float = option(60.0, "Timeout of a request in seconds.", LLM, low=0.01)
    price_in: float = option(0.0, "Price per million input tokens, for the estimate and for --max-cost.", LLM, low=0.0)
    price_out: float = option(0.0, "Price per million output tokens.", LLM, low=0.0)
    max_cost: float | None = option(None, "Stop before this cost is exceeded, in the currency of the prices.", LLM)
    max_tokens: int | None = option(None, "Stop before this total of input and output tokens is exceeded.", LLM)

    def __post_init__(self) -> None:
        make_plain(self)
        check_counts("judge", self, "parallel", "attempts")


@dataclass(frozen=True)
class JudgeOptions:
    """Everything that `hardneg judge` can be given; ``hardneg.judging.job.run`` takes an instance."""

    mining: MineOptions = field(
        metadata=part(only=_mining, helps={"out": "Output folder; run the same command again to continue."})
    )
    columns: Columns = field(default_factory=Columns, metadata=part("{}_column"))
    rules: tuple[str, ...] = option(
        (),
        "Rule to judge; braces make a family: 'BelowPositive(relative={0.2, 0.1})'. Can be repeated.",
        RULE,
        "--negatives",
        "-n",
    )
    false_negatives: float = option(0.05, "False-negative rate to certify.", PROMISE)
    confidence: float = option(0.95, "Confidence level of the certificates and upper bounds.", PROMISE)
    budget: int = option(300, "Maximum number of judgements.", PROMISE, low=1)
    judge: str = option(
        FILE, "Who judges: file (people, on a sheet), llm, file.py:function, or cross-encoder:MODEL.", JUDGE
    )
    above: float | None = option(
        None, "A pair with a grade above this is a false negative (default 0; 1 with --judge llm).", JUDGE
    )
    answers: tuple[str, ...] = option((), "Table of human answers: ids and grade; can be repeated.", JUDGE)
    sheet: int = option(0, "Pairs per sheet (0 = as many as are sure to be needed).", JUDGE, low=0)
    confirm: bool = option(
        False,
        "People confirm, on a sheet, the pairs that another judge flags; the bounds account for those it misses.",
        JUDGE,
        "--confirm",
    )
    num_known: int = option(50, "Number of known positives on which to test the judge, with --confirm.", JUDGE, low=1)
    num_mined: int = option(
        0,
        "With --confirm: number of pairs of the hardest rule that people judge regardless of the judge's answers. The "
        "judge's sensitivity is then measured on the false negatives among them instead of on known positives.",
        JUDGE,
        low=0,
    )
    asking: LLMOptions = field(default_factory=LLMOptions, metadata=part())
    resume: bool = option(False, "Only continue the job in --out; raises if there is none.", "Execution")

    def __post_init__(self) -> None:
        make_plain(self)
        check_counts("judge", self, "budget", "num_known")
        check_counts("judge", self, "sheet", "num_mined", least=0)
        check_seed("judge", self.mining.seed)
        check_range("judge", "false_negatives", self.false_negatives, 0.0, 1.0, open_high=True)
        check_range("judge", "confidence", self.confidence, 0.5, 1.0, open_high=True)
        if ":" not in self.judge.strip(":"):
            check_among("judge", "judge", self.judge, (FILE, "llm", "file.py:function", f"{MODEL}NAME"))
        if self.judge == "llm" and not (self.asking.url and self.asking.llm):
            raise argument_error("judge", "--url and --llm, the address and the model to ask", "judge", "llm")
        if self.judge != "llm" and (self.asking.url or self.asking.llm):
            fix = "add --judge llm, or leave --url and --llm out"
            raise argument_error("judge", "a judge that uses --url and --llm", "judge", self.judge, fix)
        if self.confirm and self.judge == FILE:
            raise argument_error("judge", "another judge than people for --confirm", "judge", self.judge)
        if self.num_mined and not self.confirm:
            raise argument_error("judge", "--confirm, with which people judge mined pairs", "num_mined", self.num_mined)
        if self.num_mined > self.budget:
            raise argument_error("judge", f"at most the budget of {self.budget}", "num_mined", self.num_mined)

    @property
    def threshold(self) -> float | None:
        """Grade above which a pair is a false negative; None if it is to be calibrated."""
        if self.above is not None or self.judge.startswith(MODEL):
            return self.above
        return 1.0 if self.judge == "llm" else 0.0

    def mine_options(self) -> MineOptions:
        """Return the options of the mining, with the cache of embeddings in the output folder."""
        folder = Path(self.mining.out)
        return replace(
            self.mining,
            columns=self.columns,
            cache=str(folder / "embeddings"),
            format="ids",
            out=str(folder / "mined.jsonl"),
        )
