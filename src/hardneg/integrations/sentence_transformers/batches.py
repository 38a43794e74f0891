"""Hard batches in the trainer of sentence-transformers: a factory of batch samplers and a callback in one object.

The trainer calls the object to get a batch sampler for each data set, and calls its ``on_...`` methods during training.
Nothing here imports sentence-transformers, so the HF Trainer can use the callback too, with ``encode=``.

`HardBatches` holds one `_TrainingSet` per data set, which owns the sampler, its plan and its refreshes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from hardneg.batching.filling import Guard
from hardneg.batching.graph import ProximityGraph
from hardneg.batching.plan import Plan
from hardneg.batching.planners import Planner, Proximity, UniformPlanner
from hardneg.batching.planners.base import text_of
from hardneg.batching.refresh import Refresh, eval_mode
from hardneg.batching.sampler import PlanIterator, PlannedBatchSampler
from hardneg.batching.spec import parse_batches
from hardneg.batching.stored import load_arrays, save_arrays
from hardneg.core.diagnose import LOG_PREFIX
from hardneg.core.distributed import gather
from hardneg.core.errors import ArgumentError, DataChanged, argument_error, check_count, check_kind, warn_once
from hardneg.core.tensors import unit
from hardneg.core.types import Given, Keys
from hardneg.integrations.sentence_transformers.callback import AnyLoss, LossCallback
from hardneg.integrations.sentence_transformers.fresh import FreshNegatives

TextsBySet = Sequence[str] | Mapping[str, Sequence[str]]
Encode = Callable[[list[str]], Given]
_compared = 16  # rows that are compared to recognise a data set


class HardBatches(LossCallback):
    """Batches of mutually similar texts, planned with the current model; see ``hardneg.batching``.

    Pass the object both as ``batch_sampler`` of the training arguments and in ``callbacks`` of the trainer. The plan,
    the graph and the state of the loss are saved in ``checkpoint-N/hardneg/``, so that a resumed run has the same
    batches; resuming without them raises.

    Args:
        texts: Texts to embed for the planner, one per row of the training set, usually its anchors; for several data
            sets a dict by their names. All other data sets, including those for evaluation, have uniform batches.
        every: Steps between refreshes. Each one embeds all texts in eval mode, with the prompt of their column.
        loss: Loss or losses whose schedules, diagnostics and state are handled, as by ``LossCallback``.
        planner: A planner, or its text such as ``"communities(size=16)"``.
        warmup: Epochs of uniform batches before the first refresh.
        segment: Number of batches planned at a time; by default the smaller of ``every`` and 100.
        guard: Rows that may never share a batch; for several data sets a dict by their names.
        encode: Function from texts to vectors; by default the ``encode`` of the model.
        coverage: As in ``PlannedBatchSampler``.
        seed: Seed of the plans; by default that of the training arguments.
        fresh: Negatives to mine again at each refresh; the training set must then be ``fresh.dataset``.

    Raises:
        ArgumentError: ``every``, ``warmup`` or ``planner`` has an invalid value.
    """

    def __init__(
        self,
        texts: TextsBySet,
        every: int = 200,
        loss: AnyLoss | None = None,
        *,
        planner: Planner | str = Proximity(),
        warmup: int = 0,
        segment: int | None = None,
        coverage: str = "once",
        guard: Guard | Mapping[str, Guard] | None = None,
        encode: Encode | None = None,
        seed: int | None = None,
        fresh: FreshNegatives | None = None,
    ) -> None:
        super().__init__(loss)
        self.is_callback = False
        self.fresh, self._age = fresh, None if fresh is None else fresh.age(0)
        every = check_count("HardBatches", "every", every)
        warmup = check_count("HardBatches", "warmup", warmup, least=0)
        named = texts if isinstance(texts, Mapping) else {"": texts}
        self.sets = {name: _TrainingSet(name, list(each)) for name, each in named.items()}
        self.every, self.warmup, self.segment = every, warmup, segment or min(every, 100)
        self.planner = parse_batches(planner).planner if isinstance(planner, str) else planner
        check_kind("HardBatches", "planner", self.planner, Planner, "a planner such as Proximity(), or its text")
        self.coverage, self.encode, self.seed = coverage, encode, seed
        self.guards = guard if isinstance(guard, Mapping) else {"": guard}

    def __call__(
        self, dataset: Any, batch_size: int, drop_last: bool = False, *_: Any, seed: int | None = 0, **__: Any
    ) -> PlannedBatchSampler:
        """Return the batch sampler of a data set; the trainer calls this.

        Args:
            dataset: A data set of known length. It is planned if one of its columns equals ``texts``, else uniform.
            batch_size: Rows per batch.
            drop_last: Drop an incomplete last batch.
            seed: Seed, unless ``HardBatches`` has one.

        Raises:
            ArgumentError: The data set has no length, or ``fresh`` belongs to another data set.
        """
        if not hasattr(dataset, "__len__"):
            raise ArgumentError("HardBatches", "a data set of known length", type(dataset).__name__, "train without it")
        own = next((each for each in self.sets.values() if each.matches(dataset)), None)
        options: dict[str, Any] = {"seed": (seed or 0) if self.seed is None else self.seed, "drop_last": drop_last}
        size = min(batch_size, len(dataset))
        if own is None:
            return PlannedBatchSampler(UniformPlanner(), len(dataset), size, **options)
        if getattr(dataset, "fresh", self.fresh) is not self.fresh:
            what = "the FreshNegatives whose data set is trained on"
            raise argument_error("HardBatches", what, "fresh", self.fresh, "otherwise its negatives stay random")
        options |= {"coverage": self.coverage, "segment": self.segment, "guard": self.guards.get(own.name)}
        own.made = HardBatchSampler(self.planner, len(dataset), size, warmup_epochs=self.warmup, **options)
        own.made.hard = self
        return own.made

    def on_init_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note that the trainer calls this object as a callback."""
        self.is_callback = True  # an evaluation may precede training

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Check the training set and the processes, then restore the state of a resumed run.

        Raises:
            ArgumentError: No training set has the given texts, or the model is sharded.
        """
        self.is_callback = True  # added by add_callback, which does not call on_init_end
        unused = [each.name or "texts" for each in self.sets.values() if each.made is None]
        if unused:
            fix = "pass batch_sampler=hard and the same rows as texts; an IterableDataset cannot be planned"
            raise ArgumentError("HardBatches", "a training set with the given texts", f"none for {unused}", fix)
        if self.encode is None and (getattr(args, "fsdp", None) or getattr(args, "deepspeed", None)):
            what = "a model that is not sharded, to embed the texts"
            raise ArgumentError("HardBatches", what, "FSDP or DeepSpeed", "pass encode=, or train without HardBatches")
        if args.world_size > 1 and not _splits(args):
            warn_once(
                "hard_batches.split",
                "HardBatches plans one batch for all processes, but each process trains on a different batch. Use "
                "accelerator_config={'split_batches': True} and the total batch size as per_device_train_batch_size.",
            )
        for each in self.sets.values():
            each.begin(state.num_train_epochs)
        super().on_train_begin(args, state, control, **more)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Run the first refresh after the warm-up; the trainer requests the batches of the epoch afterwards."""
        begun = int(state.epoch or 0) >= self.warmup
        lacks_plans = self.planner.needs != "nothing" and any(each.data is None for each in self.sets.values())
        if begun and (lacks_plans or (self.fresh is not None and self.fresh.mined_at is None)):
            self.refresh(args, state.global_step, more["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Refresh every ``every`` steps after the warm-up."""
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        used = self.planner.needs != "nothing" or self.fresh is not None
        if used and int(state.epoch or 0) >= self.warmup:
            self.refresh(args, state.global_step, more["model"])

    def refresh(self, args: Any, step: int, model: Any) -> None:
        """Embed the texts with the current model, plan the next segment, and mine fresh negatives.

        Args:
            args: Training arguments, for prompts, devices and ranks.
            step: Number of optimiser steps so far.
            model: The model in training.
        """
        if self.fresh is not None:
            prompts = getattr(args, "prompts", None)
            self.fresh.refresh(lambda texts, column: self._vectors(texts, _prompt(prompts, column), args, model), step)
        for each in self.sets.values() if self.planner.needs != "nothing" else ():
            assert each.sampler is not None
            if each.planned is None:
                each.planned = Refresh(
                    each.sampler,
                    self.every,
                    lambda: torch.empty(0),
                    num_neighbours=getattr(self.planner, "num_neighbours", 100),
                    num_candidates=getattr(self.planner, "num_candidates", 1000),
                    seed=each.sampler.seed,
                )
            vectors = self._vectors(each.texts, each.prompt(getattr(args, "prompts", None)), args, model)
            each.planned.vectors = lambda vectors=vectors: vectors  # type: ignore[misc]
            each.planned.now(step)

    def record(self, folder: Path) -> dict[str, Any]:
        """Write plans, graphs and fresh negatives to the folder; return what identifies them."""
        kept = [each.save(folder, number) for number, each in enumerate(self.sets.values())]
        found: dict[str, Any] = {"planner": text_of(self.planner), "sets": kept}
        if self.fresh is not None:
            found["fresh"] = {"mined_at": self.fresh.save(folder / "fresh.npz")}
        return found

    def restore(self, folder: Path, record: dict[str, Any]) -> None:
        """Read what ``record`` wrote.

        Raises:
            DataChanged: The planner, the texts or the use of fresh negatives differs from the interrupted run.
        """
        here = {"planner": text_of(self.planner), "sets": [[each.name, each.digest] for each in self.sets.values()]}
        there = {"planner": record["planner"], "sets": [[kept["name"], kept["texts"]] for kept in record["sets"]]}
        if here != there:
            fix = "resume with the texts and the planner of the interrupted run"
            raise DataChanged("HardBatches", str(there), str(here), fix)
        for number, (each, kept) in enumerate(zip(self.sets.values(), record["sets"], strict=True)):
            each.load(folder, number, kept["data"])
        if (self.fresh is None) == ("fresh" in record):
            fix = "use fresh negatives in a resumed run exactly if the interrupted run did"
            got = "none" if self.fresh is None else "some"
            raise DataChanged("HardBatches", "the fresh negatives of the interrupted run", got, fix)
        if self.fresh is not None:
            self.fresh.load(folder / "fresh.npz", record["fresh"]["mined_at"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the age of fresh negatives; advance schedules and diagnostics as ``LossCallback`` does."""
        self._age = None if self.fresh is None else self.fresh.age(state.global_step)
        super().on_step_begin(args, state, control, **more)

    def diagnostics(self) -> dict[str, float]:
        """Return the diagnostics of the loss and, with fresh negatives, the steps since they were mined."""
        return super().diagnostics() | ({} if self._age is None else {f"{LOG_PREFIX}age": float(self._age)})

    def _vectors(self, texts: list[str], prompt: str | None, args: Any, model: Any) -> Annotated[Tensor, "n d"]:
        """Embed the texts, a share per process, and gather them, [n, d]; random numbers of training are unaffected."""
        size, rank = args.world_size, args.process_index
        low, high = len(texts) * rank // size, len(texts) * (rank + 1) // size
        model = getattr(model, "module", model)
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), eval_mode(model), torch.no_grad():
            vectors = self._encoder(prompt, args, model)(texts[low:high])
        if isinstance(vectors, Tensor) and vectors.layout != torch.strided:  # from a SparseEncoder
            vectors = vectors.to_dense()
        return gather(Keys(unit(Keys(vectors).vectors.to(args.device)).clone())).vectors

    def _encoder(self, prompt: str | None, args: Any, model: Any) -> Encode:
        """Return the function from texts to vectors: ``encode``, or that of the model with its prompt."""
        if self.encode is not None:
            return self.encode
        how = {"batch_size": args.per_device_eval_batch_size, "convert_to_tensor": True, "show_progress_bar": False}
        return lambda texts: model.encode(texts, prompt=prompt, **how)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as text, without texts and model: the trainer saves its arguments, which include this object."""
        return str, (repr(self),)

    def __deepcopy__(self, memory: Any) -> Self:
        """Return the object itself, so that copied training arguments share its state."""
        return self

    def __repr__(self) -> str:
        return f"HardBatches({text_of(self.planner)}, every={self.every}, warmup={self.warmup})"


class HardBatchSampler(PlannedBatchSampler):
    """Batch sampler that warns if the trainer uses it without its callback, which refreshes the batches."""

    hard: HardBatches

    def __iter__(self) -> PlanIterator:
        """Iterate over the batches of an epoch; warn once if the callback is missing."""
        if not self.hard.is_callback:
            warn_once(
                "hard_batches.callback",
                "HardBatches is the batch sampler but not a callback of the trainer: the batches are uniform, and "
                "nothing is refreshed or saved. Pass callbacks=[hard].",
            )
        return super().__iter__()


@dataclass(eq=False)
class _TrainingSet:
    """One training set: its texts, its batch sampler and the refreshes of its plan.

    Attributes:
        name: Name among several data sets, or "".
        texts: One text per row, embedded for the planner.
        column: Column of the data set that holds the texts.
        made: The last sampler made for the trainer; an evaluation on the same rows replaces it.
        sampler: The sampler of training.
        planned: Refreshes of the sampler; None before the first.
    """

    name: str
    texts: list[str]
    column: str | None = None
    made: HardBatchSampler | None = None
    sampler: PlannedBatchSampler | None = None
    planned: Refresh | None = field(default=None, repr=False)

    def begin(self, epochs: int) -> None:
        """Use the last sampler for training."""
        self.sampler, self.planned = self.made, None
        assert self.sampler is not None
        self.sampler.total_epochs = epochs

    def matches(self, dataset: Any) -> bool:
        """Return True if a column of the data set holds these texts; remember the column, which decides the prompt."""
        if len(dataset) != len(self.texts) or not self.texts:
            return False
        places = sorted({len(self.texts) * i // _compared for i in range(_compared)} | {len(self.texts) - 1})
        rows = [(dataset[place], self.texts[place]) for place in places]
        equal = [name for name in rows[0][0] if all(row[name] == text for row, text in rows)]
        self.column = equal[0] if equal else None
        return bool(equal)

    def prompt(self, prompts: Any) -> str | None:
        """Return the prompt of the column of the texts."""
        return _prompt(prompts, self.name, self.column)

    @property
    def data(self) -> Any:
        """Graph or vectors that the plans come from; None before the first refresh."""
        return None if self.sampler is None else self.sampler.data

    @property
    def digest(self) -> str:
        """Checksum of the texts, compared when a run resumes."""
        found = hashlib.blake2b(digest_size=8)
        for text in self.texts:
            found.update(text.encode() + b"\0")
        return found.hexdigest()

    def save(self, folder: Path, number: int) -> dict[str, Any]:
        """Write plan and data to the folder; return name, digest and kind of data."""
        assert self.sampler is not None
        self.sampler.plan.save(folder / f"plan-{number}.npz")
        data, path = self.data, folder / f"data-{number}.npz"
        if isinstance(data, ProximityGraph):
            data.save(path)
        elif isinstance(data, Tensor):
            save_arrays(path, vectors=data.cpu().numpy())
        kind = "graph" if isinstance(data, ProximityGraph) else "vectors" if isinstance(data, Tensor) else None
        return {"name": self.name, "texts": self.digest, "data": kind}

    def load(self, folder: Path, number: int, kind: str | None) -> None:
        """Read plan and data from the folder."""
        assert self.sampler is not None
        path = folder / f"data-{number}.npz"
        self.sampler.plan = Plan.load(folder / f"plan-{number}.npz")
        if kind == "graph":
            self.sampler.data = ProximityGraph.load(path)
        elif kind == "vectors":
            fix = "start a new run without it"
            self.sampler.data = load_arrays("HardBatches", path, lambda parts: torch.from_numpy(parts["vectors"]), fix)


def _prompt(prompts: Any, *keys: str | None) -> str | None:
    """Look up the prompt in ``prompts`` of the trainer: one text, or texts by column, data set, or both."""
    found = prompts
    for key in keys:
        if isinstance(found, Mapping) and key in found:
            found = found[key]
    return found if isinstance(found, str) else None


def _splits(args: Any) -> bool:
    """Return True if accelerate splits each batch over the processes."""
    config = getattr(args, "accelerator_config", None)
    return bool(config.get("split_batches") if isinstance(config, Mapping) else getattr(config, "split_batches", False))
