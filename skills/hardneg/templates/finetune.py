"""Mine hard negatives, audit them, fine-tune a sentence-transformers model on them, and evaluate it before and after.

    python finetune.py FOLDER --model MODEL --out OUT

FOLDER is a BEIR folder: queries.jsonl, corpus.jsonl, qrels/train.tsv and qrels/test.tsv (.gz is read, too). Negatives
are mined for the queries of train.tsv only, and the figures are those of test.tsv. Needs the extras eval, text and
train.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from hardneg.integrations.sentence_transformers import LossCallback, NegativesLoss, with_ids


def hardneg(*arguments: str) -> dict:
    """Run a verb and return its result; an error stops the script with the sentence that names the fix."""
    done = subprocess.run([sys.executable, "-m", "hardneg", *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def evaluate(model: str, folder: str) -> float:
    return hardneg("evaluate", f"st:{model}", "--beir", folder)["retrieval"]["ndcg@10"]


def mine(options: argparse.Namespace, out: Path) -> Dataset:
    """Mine negatives, stop if any of them is a positive, and return them as a training set."""
    rule = ("-n", options.negatives, "-k", str(options.k), "--near-positive", "0.95")
    hardneg("mine", options.folder, "--model", options.model, *rule, "--format", "n-tuple", "-o", str(out))
    found = hardneg("audit", str(out), "-o", str(out.with_name("audit")))["mined"]
    print(f"mined {found['negatives']:,} negatives for {found['queries']:,} queries; {found['short']:,} are short")
    false = found["equal_to_positive"] + found["positive_under_another_id"]
    if false:
        sys.exit(f"{false} negatives are positives of their query: see {out.with_name('audit')}/audit.html")
    return Dataset.from_parquet(str(out))


def train(options: argparse.Namespace, data: Dataset, out: Path) -> None:
    model = SentenceTransformer(options.model)
    loss = NegativesLoss(model, options.loss_negatives, temperature=0.05)
    settings = SentenceTransformerTrainingArguments(
        str(out / "checkpoints"),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    callbacks = [LossCallback(loss)]
    trainer = SentenceTransformerTrainer(model, settings, with_ids(data), loss=loss, callbacks=callbacks)
    trainer.train()
    model.save_pretrained(str(out / "model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--model", required=True, help="name or path of a sentence-transformers model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--negatives", default="BelowPositive(relative=0.05)", help="rule of the mined negatives")
    parser.add_argument("--loss-negatives", default="Uniform()", help="rule of the negatives of the loss")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    before = evaluate(options.model, options.folder)
    train(options, mine(options, options.out / "mined.parquet"), options.out)
    after = evaluate(str(options.out / "model"), options.folder)
    print(f"nDCG@10 on the test queries: {before:.4f} before, {after:.4f} after")


if __name__ == "__main__":
    main()
