"""Fresh vectors for a planner: encode the data set again, or take what training has harvested by id.

The authors of ProSampler harvest: embeddings of the last windows, made in train mode with weights that moved on. That
costs nothing and is a little stale. A pass of the encoder in eval mode is exact and costs a forward pass over the data.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from hardneg.batching.background import PlanningProcess
from hardneg.batching.graph import ProximityGraph, graph_of
from hardneg.batching.sampler import PlannedBatchSampler
from hardneg.core.errors import argument_error, check_count
from hardneg.core.tensors import unit
from hardneg.core.types import Given, Keys
from hardneg.core.views import HasKeys


def first_of(batch: Any) -> Any:
    """The inputs of a batch: itself, or its first part where the loader gives (inputs, labels, ...)."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


@torch.no_grad()
def encode(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    inputs: Callable[[Any], Any] = first_of,
    device: torch.device | str | None = None,
    normalize: bool = True,
    progress: bool = True,
) -> Annotated[Tensor, "n d"]:
    """The vectors of all instances, in the loader's order: in eval mode, without gradients, on the CPU, unit norm.

    The loader goes over the data set in order (no shuffling, nothing dropped). ``inputs`` picks what the model takes
    from a batch. Every module is left in the mode it was in.
    """
    device = device if device is not None else device_of(model)
    rows = []
    with eval_mode(model):
        for batch in _shown(loader, progress):
            taken = inputs(batch)
            vectors = model(taken.to(device) if hasattr(taken, "to") else taken)  # graphs and encodings have it too
            rows.append((unit(vectors).float() if normalize else vectors.float()).cpu())
    if not rows:
        raise argument_error("encode", "a loader with at least one batch", "loader", loader)
    return torch.cat(rows)


def harvested(bank: HasKeys, num_instances: int) -> Annotated[Tensor, "n d"]:
    """The vectors of a bank by id, [num_instances, d]; an instance not visited yet is 0, similar to no other."""
    keys: Keys = bank.keys()
    if keys.ids is None or len(keys) == 0:
        raise argument_error("harvested", "a bank with at least one instance, by id", "number of keys", len(keys))
    if int(keys.ids.max()) >= num_instances:
        raise argument_error("harvested", f"ids below {num_instances}", "largest id", int(keys.ids.max()))
    vectors = keys.vectors.new_zeros(num_instances, keys.dim)
    known = keys.ids >= 0
    vectors[keys.ids[known]] = keys.vectors[known].detach()
    return vectors.cpu()


class Refresh:
    """Gives a sampler fresh data every so many steps: ``refresh(step)`` after each training step.

    ``vectors`` is called for the vectors, [n, d]: ``lambda: encode(model, loader)`` or ``lambda: harvested(bank, n)``.
    A planner that needs a graph gets one of ``num_neighbours`` and ``num_candidates``. Its randomness depends on the
    seed and the step only, so a resumed run builds the same graph from the same vectors. From vectors on a GPU the
    graph is built while training continues; the next segment waits for it.
    """

    def __init__(
        self,
        sampler: PlannedBatchSampler,
        every: int,
        vectors: Callable[[], Given],
        *,
        num_neighbours: int = 100,
        num_candidates: int | None = 1000,
        seed: int = 0,
    ) -> None:
        self.every = check_count("Refresh", "every", every)
        self.sampler, self.vectors, self.seed = sampler, vectors, seed
        self.num_neighbours, self.num_candidates = num_neighbours, num_candidates
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._process: PlanningProcess | None = None

    def __call__(self, step: int) -> bool:
        """Refreshes after steps every, 2 x every, ...; says whether it did."""
        if step == 0 or step % self.every:
            return False
        self.now(step)
        return True

    def now(self, step: int = 0) -> None:
        """Refreshes at once, for instance before the first hard epoch."""
        vectors = Keys(self.vectors()).vectors.clone()  # training continues meanwhile, perhaps in the same buffer
        if self.sampler.planner.needs != "graph":
            self.sampler.data = vectors
            return
        generator = torch.Generator(vectors.device).manual_seed((self.seed * 2**31 + step) % 2**63)
        build = partial(graph_of, vectors, self.num_neighbours, self.num_candidates, generator)
        self.sampler.data = self._aside(build, vectors.device) if vectors.is_cuda else build()

    def _aside(self, build: Callable[[], ProximityGraph], device: torch.device) -> Future[ProximityGraph]:
        """The graph in a thread and a stream of its own, which begins when the vectors are there."""
        if self._thread is None or self._stream is None:
            # One stream for all graphs: freed memory is kept for its stream, so another stream for each graph would
            # allocate from the device again each time, which stops everything that runs there.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hardneg-graph")
            self._process = PlanningProcess()
        stream, ready = self._stream, torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))

        def work() -> ProximityGraph:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                graph = build()
                graph.digest  # noqa: B018, kept by the graph: the plan will ask for it
            self._plan_next(graph)
            return graph

        return self._thread.submit(work)

    def _plan_next(self, graph: ProximityGraph) -> None:
        """The segment that waits for this graph; without the process, the sampler plans it by itself."""
        if self._process is None:
            return
        try:
            self.sampler.plan_next(graph, self._process)
        except (EOFError, OSError, pickle.PickleError, AttributeError, TypeError):  # the last two: it cannot be pickled
            self._process = None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards in the mode it was in."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _shown(loader: Iterable[Any], progress: bool) -> Iterable[Any]:
    if not progress:
        return loader
    from rich.progress import track

    return track(loader, description="Encoding", total=len(loader) if isinstance(loader, Sized) else None)


def device_of(model: nn.Module) -> torch.device:
    """That of its weights; the CPU for a module that has none."""
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
