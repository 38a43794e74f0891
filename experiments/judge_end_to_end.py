"""Mine, judge 300 pairs, choose, mine again and train: nfcorpus with a static model, five seeds.

Each training query knows only its best judged document. The other relevant documents are hidden: they answer the
300 questions of `hardneg judge`, and count the false negatives of each arm. All arms train the same model on (anchor,
positive, five negatives) with the same number of steps; the learning rate of each is chosen on the dev queries with
seed 0, and nDCG@10 (graded gains, all judged documents) is that of the test queries.

    pip install --no-deps wordllama
    python experiments/judge_end_to_end.py --data DIR --out experiments/judge_end_to_end.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined_training import encode, static_model, train

from hardneg.core.errors import HardnegWarning
from hardneg.io.provenance import environment
from hardneg.judging import job as judging
from hardneg.judging.options import JudgeOptions
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.training.data.named import default_root

RULES = ("BelowPositive(relative={0.7, 0.5, 0.3, 0.15, 0.05})",)
USUAL = "BelowPositive(relative=0.05)"
RATES, EPOCHS, K = (1e-2, 3e-2, 1e-1), 3, 5
encode = encode  # named as judge_end_to_end:encode in the jobs


@dataclass(frozen=True)
class Split:
    """Queries with the grades of their documents, by row."""

    ids: list[str]
    queries: list[str]
    grades: list[dict[int, int]]


def read(folder: Path) -> tuple[list[str], list[str], dict[str, Split]]:
    """Ids and texts of the documents, and the splits."""

    def rows(name: str) -> list[list[str]]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as file:
            return [line.rstrip("\n").split("\t") for line in file]

    documents = rows("docs.tsv.gz")
    row_of = {row[0]: number for number, row in enumerate(documents)}
    texts = {(row[0], row[1]): row[2] for row in rows("queries.tsv.gz")}
    graded: dict[tuple[str, str], dict[int, int]] = {}
    for split, query, document, level in rows("qrels.tsv.gz"):
        if document in row_of and (split, query) in texts:
            graded.setdefault((split, query), {})[row_of[document]] = int(level)
    splits = {}
    for name in ("train", "dev", "test"):
        own = [key for key in graded if key[0] == name]
        splits[name] = Split([key[1] for key in own], [texts[key] for key in own], [graded[key] for key in own])
    return [row[0] for row in documents], [row[1] for row in documents], splits


_truth: dict[str, set[str]] = {}


def judge(pairs: list[tuple[str, str]]) -> list[bool]:
    """The hidden judgements, by texts."""
    return [document in _truth.get(query, ()) for query, document in pairs]


def ndcg(model: Any, documents: list[str], split: Split) -> Any:
    """nDCG@10 of each query, with the grades as gains."""
    vectors = model.encode(documents, show_progress_bar=False, normalize_embeddings=True)
    queries = model.encode(split.queries, show_progress_bar=False, normalize_embeddings=True)
    best = torch.from_numpy(queries @ vectors.T).topk(10, dim=1).indices.tolist()
    discount = 1 / np.log2(np.arange(2, 12))
    found = []
    for rows, grades in zip(best, split.grades, strict=True):
        gains = np.array([grades.get(row, 0) for row in rows]) @ discount
        ideal = np.sort(list(grades.values()))[::-1][:10]
        found.append(gains / (ideal @ discount[: len(ideal)]))
    return np.array(found)


def interval(values: Any) -> dict[str, float]:
    """Mean and 95 % interval of values over queries and seeds [seeds, queries]: both are drawn again."""
    random, (seeds, queries) = np.random.default_rng(0), values.shape
    means = [
        values[random.integers(0, seeds, seeds)][:, random.integers(0, queries, queries)].mean() for _ in range(4000)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def false_rate(path: str, relevant: dict[str, set[str]]) -> dict[str, float]:
    """The share of mined negatives that are relevant, and their number."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    false = [negative in relevant[row["query_id"]] for row in rows for negative in row["negative_ids"]]
    return {"negatives": len(false), "false": sum(false), "rate": sum(false) / len(false)}


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_root())
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--budget", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("experiments/judge_end_to_end.json"))
    options = parser.parse_args()
    warnings.simplefilter("ignore", HardnegWarning)
    torch.set_num_threads(1)
    names, documents, splits = read(options.data / "nfcorpus")
    chosen = np.random.default_rng(0).permutation(len(splits["train"].ids))[: options.queries].tolist()
    training = [(splits["train"].ids[i], splits["train"].queries[i], splits["train"].grades[i]) for i in chosen]
    relevant = {identity: {names[row] for row in grades} for identity, _, grades in training}
    for _, text, grades in training:
        _truth.setdefault(text, set()).update(documents[row] for row in grades)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        queries = [
            {"id": identity, "query": text, "positive": [names[max(grades, key=lambda row: (grades[row], -row))]]}
            for identity, text, grades in training
        ]
        for name, rows in (
            ("queries", queries),
            ("corpus", [{"id": name, "text": text} for name, text in zip(names, documents, strict=True)]),
        ):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        inputs = {
            "queries": str(folder / "queries.jsonl"),
            "corpus": str(folder / "corpus.jsonl"),
            "encoder": "judge_end_to_end:encode",
            "cache_key": "1",
            "k": K,
            "cache": str(folder / "cache"),
        }
        settings = JudgeOptions(
            MineOptions(**inputs, out=str(folder / "judged")),
            rules=RULES,
            budget=options.budget,
            judge="judge_end_to_end:judge",
        )
        judged = judging.run(settings).result
        table = str(folder / "judged" / "judgements.tsv")
        rule = judged.chosen or USUAL
        arms = {
            "usual margin": (USUAL, None),
            "usual margin, found positives": (USUAL, table),
            "chosen rule, found positives": (rule, table),
        }
        found: dict[str, Any] = {
            "queries": len(training),
            "chosen": judged.chosen,
            "judgements": judged.spent,
            "found_positives": sum(pair.false_negative is True for pair in judged.pairs),
            "rates": {name: list(bounds) for name, bounds in judged.rates.items()},
            "arms": {},
        }
        scores = {"untrained": ndcg(static_model(), documents, splits["test"])[None]}
        for number, (arm, (negatives, judgements)) in enumerate(arms.items()):
            mined = {"negatives": negatives, "judgements": judgements, "scores": False}
            lists, rows = (
                str(folder / f"{kind}{number}.{end}") for kind, end in (("ids", "jsonl"), ("rows", "parquet"))
            )
            run(MineOptions(**{**inputs, **mined}, out=lists, format="ids"))
            run(MineOptions(**{**inputs, **mined}, out=rows, format="n-tuple"))
            data = Dataset.from_parquet(rows, cache_dir=str(folder), keep_in_memory=True)
            dev = {rate: float(ndcg(train(data, rate, EPOCHS, 0), documents, splits["dev"]).mean()) for rate in RATES}
            rate = max(dev, key=lambda one: dev[one])
            models = [train(data, rate, EPOCHS, seed) for seed in range(options.seeds)]
            scores[arm] = np.stack([ndcg(model, documents, splits["test"]) for model in models])
            found["arms"][arm] = {
                "negatives": negatives,
                "false_negatives": false_rate(lists, relevant),
                "rows": len(data),
                "learning_rate": rate,
                "dev": {f"{one:g}": value for one, value in dev.items()},
                "ndcg@10": interval(scores[arm]),
                "seeds": scores[arm].mean(1).tolist(),
            }
            print(arm, json.dumps(found["arms"][arm]), flush=True)
    found["untrained"] = float(scores["untrained"].mean())
    first = scores["usual margin"]
    found["against_usual"] = {
        arm: interval(values - first) for arm, values in scores.items() if arm not in ("untrained", "usual margin")
    }
    options.out.write_text(json.dumps(found | environment(), indent=1) + "\n")
    print(json.dumps(found["against_usual"]), found["untrained"], found["found_positives"])


if __name__ == "__main__":
    import judge_end_to_end

    judge_end_to_end.main()  # in the module that the jobs import, which has the truth
