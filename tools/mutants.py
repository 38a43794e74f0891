"""Count how many hand-made faults the tests catch: `python tools/mutants.py`, or with words to choose some.

Each fault changes one expression of the core, the losses, mining, state, batching or recipes in a copy of the tree. The
tests named with it are run there; a fault that they do not catch is run again with all tests of `make test`, unless
`--named` is given. Use it when tests are moved, shortened or rewritten: as many faults must be caught as before, which
`--root` measures for another checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE, LOSSES, NEGATIVES = "tests/core", "tests/losses tests/papers", "tests/negatives tests/core"
MINING, STATE, BATCHING = "tests/mining", "tests/state", "tests/batching"
TRAINING = "tests/training/test_train_recipes.py tests/training/test_bank_recipes.py tests/training/test_optimisers.py"


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``file``, the only occurrence of ``before`` becomes ``after``; ``tests`` should catch it."""

    file: str
    before: str
    after: str
    tests: str


MUTANTS = [
    Mutant("core/tiles.py", "(anchor != candidate) | (anchor < 0) if given", "(anchor != candidate) if given", CORE),
    Mutant("core/tiles.py", "return self.s * self.temperature", "return self.s", NEGATIVES),
    Mutant("core/tiles.py", "return (anchor == candidate).any(-1)", "return (anchor == candidate).all(-1)", NEGATIVES),
    Mutant("core/pairing.py", "valid = valid & other_id(own, ids)", "valid = valid | other_id(own, ids)", CORE),
    Mutant("core/pairing.py", "else valid & ~promoted, promoted)", "else valid, promoted)", LOSSES),
    Mutant("core/pairing.py", "return values + values * 0.0", "return values", CORE),
    Mutant("core/pairing.py", "return views.roll(len(views) // 2, 0)[:, None]", "return views[:, None]", LOSSES),
    Mutant("core/pairing.py", "return candidates.diagonal()[:, None]", "return candidates[:, :1]", LOSSES),
    Mutant("core/statistics.py", "terms = candidates + torch.log_softmax(log_w, dim=-1)", "terms = candidates + log_w", CORE),
    Mutant("core/statistics.py", "safe, found = log_w.masked_fill(none, 0.0)", "safe, found = log_w.masked_fill(none, NEVER)", CORE),
    Mutant("core/statistics.py", "return grad * share, grad * (share - mass.share(relative))", "return grad * share, grad * share", LOSSES),
    Mutant("core/statistics.py", "return torch.where(mass.log_mass == NEVER, NEVER, total - mass.log_mass)", "return total", LOSSES),
    Mutant("core/bounds.py", "return (value < edge[0]) | ((value == edge[0]) & (column > edge[1]))", "return value < edge[0]", NEGATIVES),
    Mutant("core/bounds.py", "return (value > edge[0]) | ((value == edge[0]) & (column <= edge[1]))", "return value >= edge[0]", NEGATIVES),
    Mutant("core/bounds.py", "return (first[0] + second[0],)", "return (second[0],)", LOSSES),
    Mutant("core/bounds.py", "return (torch.maximum(first[0], second[0]),)", "return (torch.minimum(first[0], second[0]),)", LOSSES),
    Mutant("core/bounds.py", "left = valid = valid & allowed", "left = valid = valid", LOSSES + " tests/integrations"),
    Mutant("core/objectives/base.py", "real = real.masked_fill(none, False)", "real = real", CORE),
    Mutant("core/objectives/base.py", "return sums.sum() / counts.sum().clamp(min=1.0)", "return (sums / counts.clamp(min=1.0)).mean()", CORE),
    Mutant("core/objectives/base.py", "number = self.real.sum(-1) + number", "number = number", LOSSES),
    Mutant("core/objectives/base.py", "close = x > -math.log(2.0)", "close = x > 1.0", CORE),
    Mutant("core/objectives/info_nce.py", "clamp_(min=floor)", "clamp_(min=-1e9)", CORE + " tests/kernels/test_tilted.py"),
    Mutant("core/objectives/info_nce.py", "sub_(math.log1p(-tau_plus))", "sub_(0.0)", CORE + " tests/kernels/test_tilted.py"),
    Mutant("core/objectives/info_nce.py", "by_mean = torch.where(free, grad / left, 0.0)", "by_mean = grad / left", CORE + " tests/kernels/test_tilted.py"),
    Mutant("core/objectives/jsd.py", "return negative + softplus(-positive) - 2.0 * math.log(2.0)", "return negative + softplus(-positive)", CORE),
    Mutant("core/objectives/sigmoid.py", "return softplus(-positive - self.bias)", "return softplus(-positive + self.bias)", CORE),
    Mutant("core/objectives/rince.py", "- (self.q * positive).exp()) / self.q", "- (self.q * positive).exp())", CORE + " tests/papers"),
    Mutant("core/objectives/surrogate.py", "return row.repulsion - positive", "return row.repulsion + positive", CORE),
    Mutant("core/objectives/surrogate.py", "row.log_mean - positive + self.rho", "row.log_mean - positive", CORE + " tests/papers"),
    Mutant("core/distributed.py", "keys.ids + begin, keys.ids", "keys.ids, keys.ids", LOSSES + " tests/core/test_distributed.py"),
    Mutant("core/diagnose.py", "_flat(scores.temperature) / (1.0 + slope)", "_flat(scores.temperature)", CORE),
    Mutant("core/tensors.py", "torch.div(across, norm,", "torch.div(grad, norm,", "tests/core/test_tensors.py"),
    Mutant("negatives/closed.py", "sum(form.beta for form in tilts)", "max((form.beta for form in tilts), default=0.0)", "tests/negatives tests/kernels/test_tilted.py"),
    Mutant("negatives/tags.py", "~tile.same_label", "tile.same_label", NEGATIVES),
    Mutant("negatives/tags.py", "~tile.same_cluster", "tile.same_cluster", NEGATIVES),
    Mutant("kernels/backends/tilted.py", "s.scatter_(1, tilt.same, NEVER)", "s", "tests/kernels/test_tilted.py"),
    Mutant("kernels/backends/tilted.py", "torch.lerp(q, share, 1.0 + tilt.slope)", "torch.lerp(q, share, 1.0)", "tests/kernels/test_tilted.py"),
    Mutant("kernels/backends/cpu.py", 'grads["log_mean"] * (1.0 + self.slope) if', 'grads["log_mean"] if', "tests/kernels/test_cpu.py"),
    Mutant("kernels/sweep.py", "add_rows(total, rows if per_anchor else slice(None), gradient)", "add_rows(total, slice(None), gradient)", "tests/losses"),
    Mutant("kernels/plan.py", "add_product(pool[cut.low : cut.high], grad.T, own)", "pass", "tests/losses"),
    Mutant("kernels/passes.py", "(parts.mass * by.exp()).sum(-1, keepdim=True)", "parts.mass.sum(-1, keepdim=True)", "tests/losses"),
    Mutant("losses/contrastive.py", "views += [] if z2 is None else [z2]", "views += []", "tests/losses"),
    Mutant("losses/contrastive.py", "if self._calls & (self._calls - 1) or not num_candidates:", "if not num_candidates:", "tests/losses tests/kernels/test_tilted.py"),
    Mutant("search/topk.py", "halves[..., 0] = np.arange(n - 1, -1, -1, dtype=np.int32)", "halves[..., 0] = np.arange(n, dtype=np.int32)", "tests/search tests/mining/test_mine.py"),
    Mutant("search/exact.py", "squares = self.squares[rows] * other.squares[columns]", "squares = self.squares[rows]", "tests/search tests/mining/test_mine.py"),
    Mutant("search/nearest.py", "similarity[query, row] = NEVER", "pass", "tests/search tests/mining/test_mine.py"),
    Mutant("mining/corpus_scores.py", "return cosine >= limit - 4.0 * torch.finfo(cosine.dtype).eps", "return cosine > limit + 1e-3", MINING),
    Mutant("mining/corpus_scores.py", "own = torch.where(ids >= 0, rows_of(ids), -1)", "own = torch.full_like(ids, -1)", MINING),
    Mutant("batching/planners/base.py", "segment = Segment(len(plan), count", "segment = Segment(0, count", BATCHING),
    Mutant("core/schedules.py", "self._length(total) - self.inclusive, 1), 1.0)", "self._length(total), 1), 1.0)", CORE),
    Mutant("negatives/tilt.py", "tilted: Tensor = s if one else self.beta * s", "tilted: Tensor = s", NEGATIVES),
    Mutant("mining/select.py", "return Selection(chosen, exact & (full | complete), left, copies)", "return Selection(chosen, full | complete, left, copies)", MINING),
    Mutant("mining/select.py", "exact = exact & (complete if depth is None else complete | (left[-1] >= depth))", "exact = exact", MINING),
    Mutant("state/pools.py", "slots = torch.arange(head, head + rows, device=self.ids.device) % self.capacity", "slots = torch.arange(rows, device=self.ids.device) % self.capacity", STATE),
    Mutant("state/pools.py", "self.momentum * self.vectors[slots] + (1.0 - self.momentum) * new", "self.momentum * self.vectors[slots] + new", STATE),
    Mutant("state/momentum.py", "1.0 - self.momentum_at(self._updates)", "self.momentum_at(self._updates)", STATE + " tests/training/test_train_recipes.py"),
    Mutant("state/partition.py", "torch.logaddexp(keep + old, take + log_g)", "torch.logaddexp(old, take + log_g)", STATE),
    Mutant("state/partition.py", "return (log_u + num_negatives.log()).to(scores.candidates.dtype)", "return log_u.to(scores.candidates.dtype)", STATE),
    Mutant("state/metropolis.py", "counted = path[:, burn_in:]", "counted = path", STATE),
    Mutant("state/metropolis.py", "proposed - log_uniforms.T", "proposed + log_uniforms.T", STATE),
    Mutant("batching/walks.py", "return 0.0 if self.kind == \"random\" else float(restart)", "return float(restart)", BATCHING),
    Mutant("papers.py", "return reduce(info_nce(scores, log_w, num_negatives=\"mass\"), scores)", "return reduce(info_nce(scores, log_w), scores)", "tests/papers"),
    Mutant("papers.py", "positives=\"label\", num_negatives=\"candidates\", reduction=\"pairs\"", "positives=\"label\", num_negatives=\"candidates\", reduction=\"anchors\"", "tests/papers"),
    Mutant("losses/global_softmax.py", "losses = surrogate(scores, walk.log_visits, log_norm=walk.log_norm)", "losses = surrogate(scores, walk.log_visits)", "tests/state tests/losses"),
    Mutant("training/loop/optimisers.py", "weight_decay if one.ndim > 1 else 0.0", "weight_decay", TRAINING),
    Mutant("training/recipes/supervised.py", '"num_negatives": "candidates", "reduction": "pairs"}', '"num_negatives": "candidates", "reduction": "anchors"}', TRAINING + " tests/training/test_recipe_losses.py"),
    Mutant("training/recipes/moco.py", "self.queue.push(self.keys)", "pass", TRAINING + " tests/training/test_recipe_losses.py"),
    Mutant("training/recipes/moco.py", "self.loss(q2, k1, batch.ids, batch.labels, pool1)", "self.loss(q2, k1, batch.ids, batch.labels, pool2)", TRAINING + " tests/training/test_recipe_losses.py"),
    Mutant("training/recipes/sogclr.py", "self.loss.negatives = self.negatives.at(step, total)", "pass", TRAINING + " tests/training/test_recipe_losses.py"),
    Mutant("training/recipes/instance.py", "torch.arange(len(self.data)), self.options.epochs", "torch.arange(len(self.data)), 0", "tests/training/test_bank_recipes.py"),
    Mutant("training/recipes/negative_cache.py", "self.cache.refresh(self.encoded, self.options.cache_refresh)", "pass", "tests/training/test_bank_recipes.py"),
    Mutant("training/recipes/pairs.py", 'Keys(z[2 * b :], ids, source="mined")', 'Keys(z[2 * b :], source="mined")', "tests/training/test_text_recipes.py"),
    Mutant("training/recipes/clip.py", "self.loss(z1, z2, self.documents[ids], labels, temperature", "self.loss(z1, z2, ids, labels, temperature", "tests/training/test_text_recipes.py tests/training/test_image_texts.py"),
]  # fmt: skip


def main() -> None:
    """Run the tests of each chosen fault and print which were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of file names; none: all faults")
    parser.add_argument("--check", action="store_true", help="check that every fault still applies, and run nothing")
    parser.add_argument("--named", action="store_true", help="run only the tests named with a fault, not all of them")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="another checkout, such as one before a change of tests"
    )
    parser.add_argument("-n", default="2", help="number of workers; 0: none")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if not options.words or any(word in each.file for word in options.words)]
    lost = not_applicable(chosen, options.root)
    for each in lost:
        print(f"does not apply: {each.file}: {each.before}")
    if options.check or (lost and options.root == ROOT):
        print(f"{len(chosen) - len(lost)} of {len(chosen)} faults apply")
        sys.exit(bool(lost))
    chosen = [each for each in chosen if each not in lost]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in ("src", "tests", "tools", "experiments", "pyproject.toml"):
            copy = shutil.copytree if (options.root / name).is_dir() else shutil.copy
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            copy(options.root / name, tree / name)
        caught = sum([_is_caught(each, tree, options) for each in chosen])
    print(f"{caught} of {len(chosen)} caught")


def not_applicable(mutants: list[Mutant], root: Path = ROOT) -> list[Mutant]:
    """Return the faults whose expression does not occur exactly once in its file."""
    files = {each: root / "src/hardneg" / each.file for each in mutants}
    return [each for each, file in files.items() if not file.exists() or file.read_text().count(each.before) != 1]


def _is_caught(mutant: Mutant, tree: Path, options: argparse.Namespace) -> bool:
    path = tree / "src/hardneg" / mutant.file
    source = path.read_text()
    path.write_text(source.replace(mutant.before, mutant.after))
    try:
        caught = not _passes([each for each in mutant.tests.split() if (tree / each).exists()], tree, options.n)
        if not caught and not options.named:
            caught = not _passes(["tests"], tree, options.n)
    finally:
        path.write_text(source)
    print(f"{'caught' if caught else 'MISSED'}  {mutant.file}: {mutant.before}", flush=True)
    return caught


def _passes(tests: list[str], tree: Path, workers: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", workers, "-m", "not long", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    run = subprocess.run([*command, *tests], cwd=tree, env=environ, capture_output=True, text=True, check=False)
    if run.returncode > 2:  # no tests, or an error of pytest; 2 is a fault that breaks an import
        raise RuntimeError(run.stdout + run.stderr)
    return run.returncode == 0


if __name__ == "__main__":
    main()
