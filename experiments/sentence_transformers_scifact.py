"""Fine-tunes all-MiniLM-L6-v2 on SciFact with losses of sentence-transformers: what each line of hardneg changes.

Arms: MultipleNegativesRankingLoss on pairs; with two mined negatives; with document ids; with hard batches as well.
The loop is that of the HF Trainer, of which the trainer of sentence-transformers is a subclass.
nDCG@10 on the test queries, three seeds, and a paired bootstrap over the queries of the differences. Also the cost of
ids, hard batches and diagnostics per step, against MultipleNegativesRankingLoss.

    python experiments/sentence_transformers_scifact.py --model PATH --data ../shared/data/scifact --out result.json

Only the cost per step, written after each round: ``--arms`` without an arm. Only some arms, compared with those of
another run as well:
``--steps 0 --arms ids "hard batches" --before earlier.json``.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import hardneg as hn
from hardneg.integrations.sentence_transformers import HardBatches, NegativesLoss, with_ids

Columns = dict[str, list[Any]]
ARMS = ("mnrl", "mined", "ids", "hard batches")
WAYS = ("mnrl", "hardneg")
ROUNDS = 5
"""How often each way is timed in turn: the clock of a machine drifts by more than the overhead."""
WARM = 10
"""Steps at the beginning of a run that do not count."""


class Table:
    """Columns as rows, with what ``with_ids`` needs of a datasets.Dataset."""

    def __init__(self, columns: Columns) -> None:
        self.columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(self.columns["anchor"])

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: each[key] for name, each in self.columns.items()}

    def remove_columns(self, names: list[str]) -> Table:
        return Table({name: each for name, each in self.columns.items() if name not in names})

    def add_column(self, name: str, column: list[Any]) -> Table:
        return Table({**self.columns, name: column})


class TextTrainer(Trainer):
    """Tokenises the columns of a batch and calls the loss with them, as the trainer of sentence-transformers does."""

    def __init__(self, model: Any, args: Any, train: Table, loss: Any, hard: HardBatches | None, **more: Any) -> None:
        super().__init__(model, args, train_dataset=train, **more)  # type: ignore[arg-type]
        self.loss, self.hard = loss, hard

    def get_train_dataloader(self) -> Any:
        size, seed = self.args.train_batch_size, self.args.seed
        order: dict[str, Any] = {"batch_size": size, "shuffle": True}
        order["generator"] = torch.Generator().manual_seed(seed)
        if self.hard is not None:
            order = {"batch_sampler": self.hard(self.train_dataset, size, seed=seed)}
        return self.accelerator.prepare(DataLoader(self.train_dataset, collate_fn=self._collate, **order))

    def _collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        names = [name for name in rows[0] if name != "label"]
        tokenize = getattr(self.model, "preprocess", None) or self.model.tokenize
        labels = {"label": torch.tensor([row["label"] for row in rows])} if "label" in rows[0] else {}
        return {"features": [dict(tokenize([row[name] for row in rows])) for name in names], **labels}

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return self.loss(inputs["features"], inputs.get("label"))


class SciFact:
    def __init__(self, folder: Path) -> None:
        corpus, queries = (
            [json.loads(line) for line in gzip.decompress((folder / f"{name}.jsonl.gz").read_bytes()).splitlines()]
            for name in ("corpus", "queries")
        )
        self.documents = [f"{each['title']} {each['text']}".strip() for each in corpus]
        self.place = {str(each["_id"]): i for i, each in enumerate(corpus)}
        self.queries = {str(each["_id"]): each["text"] for each in queries}
        self.train, self.test = (self._judged(folder / "qrels" / f"{part}.tsv") for part in ("train", "test"))

    def _judged(self, path: Path) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for line in path.read_text().splitlines()[1:]:
            query, document, score = line.split("\t")
            if int(score) > 0:
                found.setdefault(query, []).append(self.place[document])
        return found


def loaded(path: str) -> Any:
    return SentenceTransformer(path).float()  # also where the weights are stored in half precision


def encoded(model: Any, texts: list[str]) -> torch.Tensor:
    options = {"normalize_embeddings": True, "convert_to_tensor": True, "show_progress_bar": False}
    vectors: torch.Tensor = model.encode(texts, batch_size=128, **options)
    return vectors.clone()


def ndcg(model: Any, data: SciFact) -> list[float]:
    """nDCG@10 of each test query."""
    similarity = encoded(model, [data.queries[q] for q in data.test]) @ encoded(model, data.documents).T
    found = []
    for best, good in zip(similarity.topk(10).indices.tolist(), data.test.values(), strict=True):
        gain = sum(1 / np.log2(rank + 2) for rank, document in enumerate(best) if document in good)
        found.append(float(gain / sum(1 / np.log2(rank + 2) for rank in range(min(len(good), 10)))))
    return found


def rows(data: SciFact, model: Any, mined: bool) -> Table:
    queries = [query for query, good in data.train.items() for _ in good]
    positives = [document for good in data.train.values() for document in good]
    columns = {
        "anchor": [data.queries[query] for query in queries],
        "positive": [data.documents[document] for document in positives],
    }
    if mined:
        names = list(data.train)
        corpus = hn.Keys(encoded(model, data.documents).cpu(), torch.arange(len(data.documents)))
        anchors = hn.Keys(encoded(model, [data.queries[name] for name in names]).cpu())
        found = hn.mine(anchors, corpus, list(data.train.values()), hn.parse("BelowPositive(0.05) * Rank(0, 50)"), k=2)
        own = dict(zip(names, found.ids.tolist(), strict=True))
        for k in range(2):
            chosen = [own[query][k] for query in queries]
            columns[f"negative_{k + 1}"] = [data.documents[i] if i >= 0 else "" for i in chosen]
    return Table(columns)


def trained(
    arm: str, seed: int, data: SciFact, train: Table, path: str, epochs: int, batch: int
) -> tuple[list[float], float]:
    """nDCG@10 of each test query, and the seconds of training."""
    torch.manual_seed(seed)
    model = loaded(path)
    loss: Any = MultipleNegativesRankingLoss(model)
    hard = None
    if arm in ("ids", "hard batches"):
        train, loss = with_ids(train), NegativesLoss(model, temperature=0.05)
    if arm == "hard batches":
        hard = HardBatches(train["anchor"], every=20, loss=loss)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, num_train_epochs=epochs, per_device_train_batch_size=batch, learning_rate=2e-5,
            seed=seed, save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
            logging_strategy="no", bf16=torch.cuda.is_available(),
        )  # fmt: skip
        trainer = TextTrainer(model, args, train, loss, hard, callbacks=[hard] if hard else [])
        began = time.perf_counter()
        trainer.train()
        return ndcg(model, data), time.perf_counter() - began


def bootstrap(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """The mean difference of the queries' means over seeds, and its 95 % interval over resampled queries."""
    difference = (one - other).mean(0)
    random = np.random.default_rng(0)
    means = difference[random.integers(len(difference), size=(10_000, len(difference)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"difference": float(difference.mean()), "low": float(low), "high": float(high)}


class Steps(TrainerCallback):
    """Milliseconds of each step, with the device idle at both ends.

    ``whole``: from the end of a step to the end of the next, with drawing, tokenising and moving its batch, and the
    logs of the step before. ``inner``: what the trainer does with the batch, the loss, its gradient and the optimiser.
    """

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.inner: list[float] = []
        self.began = self.ended = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = self._now()
        self.whole.append(1e3 * (now - self.ended))
        self.inner.append(1e3 * (now - self.began))
        self.ended = now

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def timed(name: str, model: Any, data: Table, steps: int, batch: int) -> dict[str, list[float]]:
    """The steps of one run, without those of its beginning; diagnostics every ten steps, and one refresh before."""
    torch.manual_seed(0)
    watch, train, hard = Steps(), data, None
    loss: Any = MultipleNegativesRankingLoss(model)
    if name == "hardneg":
        train, loss = with_ids(data), NegativesLoss(model, "Tilt(1.0)", temperature=0.05)
        hard = HardBatches(train["anchor"], every=10**6, loss=loss)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps + WARM, per_device_train_batch_size=batch, seed=0, logging_steps=10,
            save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
            bf16=torch.cuda.is_available(),
        )  # fmt: skip
        TextTrainer(model, args, train, loss, hard, callbacks=[watch] if hard is None else [hard, watch]).train()
    return {"whole": watch.whole[WARM:], "inner": watch.inner[WARM:]}


def overhead(path: str, steps: int, batch: int, limit: float, report: Callable[[dict[str, Any]], None]) -> None:
    """Medians of the steps of each way, which take turns; reported after each round, until the time is up."""
    words = [f"{a} {b}" for a in ("model", "protein", "cell", "music", "river") for b in ("of", "with", "in", "and")]
    texts = [" ".join(words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(24)) for i in range(batch * 32)]
    data = Table({"anchor": [f"{i} {text}" for i, text in enumerate(texts)], "positive": texts[::-1]})
    start, began = loaded(path), time.perf_counter()
    rounds: list[dict[str, dict[str, list[float]]]] = []
    while len(rounds) < ROUNDS and time.perf_counter() - began < limit:
        found = {}
        for name in WAYS if len(rounds) % 2 == 0 else WAYS[::-1]:
            model = copy.deepcopy(start)  # a trainer changes more of it than its weights
            found[name] = timed(name, model, data, -(-steps // ROUNDS), batch)
        rounds.append(found)
        report({window: compared(rounds, window) for window in ("whole", "inner")})


def compared(rounds: list[dict[str, dict[str, list[float]]]], window: str) -> dict[str, Any]:
    """Of all steps, the medians, means and the overhead; and that of each round, whose two runs are neighbours."""
    medians = [{name: statistics.median(found[name][window]) for name in WAYS} for found in rounds]
    every = {name: [each for found in rounds for each in found[name][window]] for name in WAYS}
    median, mean = ({name: f(each) for name, each in every.items()} for f in (statistics.median, statistics.fmean))
    paired = [each["hardneg"] / each["mnrl"] - 1 for each in medians]
    return {
        "steps": len(every["mnrl"]),
        "median ms": median,
        "mean ms": mean,
        "overhead": median["hardneg"] / median["mnrl"] - 1,
        "rounds ms": medians,
        "paired overhead": {
            "median": statistics.median(paired),
            "low": min(paired),
            "high": max(paired),
            "rounds": paired,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="steps by which the overhead is measured; 0: it is not")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which no further round of it begins")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS, help="those to train; none: the overhead only")
    parser.add_argument("--before", type=Path, help="the result of another run, whose arms are compared with too")
    options = parser.parse_args()
    if options.arms and options.data is None:
        parser.error("--arms need --data")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {} if options.before is None else json.loads(options.before.read_text())
    result |= {"command": shlex.join(sys.argv), "device": device, "torch": torch.__version__}

    def write() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    def report(found: dict[str, Any]) -> None:
        result["step"] = found
        write()
        for window, each in found.items():
            shown = {name: round(ms, 2) for name, ms in each["rounds ms"][-1].items()}
            spread = "median {median:.2%}, {low:.2%} to {high:.2%}".format(**each["paired overhead"])
            all_of = f"overhead of all steps {each['overhead']:.2%}, by rounds {spread}"
            print(f"{window}, round {len(each['rounds ms'])}: {shown} ms; {all_of}", flush=True)

    if options.steps:
        overhead(options.model, options.steps, 128, options.limit, report)
    if options.arms:
        train_arms(options, result, write)


def train_arms(options: argparse.Namespace, result: dict[str, Any], write: Callable[[], None]) -> None:
    """Adds the arms to the result, each as soon as it is known, compared with those that have queries."""
    data, start = SciFact(options.data), loaded(options.model)
    setting = {"epochs": options.epochs, "batch": options.batch}
    if any(result.get(name, value) != value for name, value in setting.items()):
        raise SystemExit(f"--before has another setting than {setting}")
    result |= {**setting, "untrained": float(np.mean(ndcg(start, data)))}
    pairs, with_mined = rows(data, start, mined=False), rows(data, start, mined=True)
    print("untrained", result["untrained"], flush=True)
    arms, paired = result.setdefault("arms", {}), result.setdefault("paired", {})
    for arm in options.arms:
        train = pairs if arm == "mnrl" else with_mined
        runs = [
            trained(arm, seed, data, train, options.model, options.epochs, options.batch)
            for seed in range(options.seeds)
        ]
        queries = [[round(each, 6) for each in found] for found, _ in runs]
        seeds, seconds = [statistics.fmean(each) for each in queries], statistics.fmean(each for _, each in runs)
        arms[arm] = {"ndcg@10": statistics.fmean(seeds), "seeds": seeds, "seconds": seconds, "queries": queries}
        others = [name for name in arms if name != arm and len(arms[name].get("queries", ())) == options.seeds]
        found = {
            f"{arm} - {name}": bootstrap(*(np.array(arms[each]["queries"]) for each in (arm, name))) for name in others
        }
        paired |= found
        print(arm, {**arms[arm], "queries": len(queries[0])}, found, flush=True)
        write()


if __name__ == "__main__":
    main()
