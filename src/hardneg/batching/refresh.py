"""Fresh vectors for a planner: encode the data set again, or use the embeddings seen during training.

``Refresh`` is called after each training step, and gives the sampler (sampler.py) new vectors or a new graph;
``encode`` and ``harvested`` provide the vectors. The authors of ProSampler harvest: they use embeddings of recent
batches, made in train mode with weights that have changed since. These cost nothing and are slightly stale. Encoding
in eval mode is exact, and costs a forward pass over the data.
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
from hardneg.core.errors import ArgumentError, argument_error, check_count
from hardneg.core.tensors import unit
from hardneg.core.types import Given, Keys
from hardneg.core.views import HasKeys


def first_of(batch: Any) -> Any:
    """Return the inputs of a batch: the batch itself, or its first part if it is (inputs, labels, ...)."""
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
    """Encode all instances, in eval mode and without gradients.

    Every module is returned to the mode it was in.

    Args:
        model: Encoder; maps a batch of b inputs to vectors [b, d].
        loader: Goes over the data set in order, without shuffling or dropping instances.
        inputs: Selects the inputs of the model from a batch.
        device: Device of the inputs; None: that of the model.
        normalize: Scale the vectors to unit norm.
        progress: Show a progress bar.

    Returns:
        Vectors on the CPU in float32, in the order of the loader, shape [n, d].

    Raises:
        ArgumentError: If the loader has no batch.

    Example:
        >>> vectors = encode(nn.Linear(3, 2), [torch.randn(4, 3), torch.randn(1, 3)], progress=False)
        >>> vectors.shape
        torch.Size([5, 2])
    """
    device = device if device is not None else device_of(model)
    rows = []
    with eval_mode(model):
        for batch in _shown(loader, progress):
            taken = inputs(batch)
            vectors = model(
                taken.to(device) if hasattr(taken, "to") else taken
            )  # batches of graphs and tokens have it, too
            rows.append((unit(vectors).float() if normalize else vectors.float()).cpu())
    if not rows:
        raise argument_error("encode", "a loader with at least one batch", "loader", loader)
    return torch.cat(rows)


def harvested(bank: HasKeys, num_instances: int) -> Annotated[Tensor, "n d"]:
    """Return the vectors of a bank, ordered by id.

    Args:
        bank: Bank of embeddings with ids, filled during training.
        num_instances: Number of instances of the data set, n.

    Returns:
        Vectors on the CPU, shape [n, d]; 0, and so similar to no other, for an instance that was not visited yet.

    Raises:
        ArgumentError: If the bank is empty, has no ids, or has an id of n or more.
    """
    keys: Keys = bank.keys()
    if keys.ids is None or len(keys) == 0:
        got = f"{len(keys)} instances" + " without ids" * (keys.ids is None)
        raise ArgumentError("harvested", "a bank that holds instances with their ids", got)
    if int(keys.ids.max()) >= num_instances:
        raise argument_error("harvested", f"ids below {num_instances}", "largest id", int(keys.ids.max()))
    vectors = keys.vectors.new_zeros(num_instances, keys.dim)
    known = keys.ids >= 0
    vectors[keys.ids[known]] = keys.vectors[known].detach()
    return vectors.cpu()


class Refresh:
    """Gives a sampler fresh vectors or a fresh graph at regular steps.

    Call ``refresh(step)`` after each training step.

    Randomness depends only on the seed and the step, so a resumed run builds the same graph from the same vectors. From
    vectors on a GPU, the graph is built while training continues; the next segment waits for it.

    Args:
        sampler: Sampler to refresh.
        every: Number of steps between refreshes.
        vectors: Function that returns the vectors, [n, d], such as ``lambda: encode(model, loader)`` or
            ``lambda: harvested(bank, n)``.
        num_neighbours: Number of neighbours of the graph, for planners that need one.
        num_candidates: Number of random candidates for the neighbours; None: all others.
        seed: Seed of the graphs.

    Example:
        >>> from hardneg.batching.sampler import ProximityBatchSampler
        >>> sampler = ProximityBatchSampler(num_instances=20, batch_size=4)
        >>> refresh = Refresh(sampler, 100, lambda: torch.randn(20, 3), num_neighbours=5, num_candidates=10)
        >>> refresh(99), refresh(100), sampler.graph.neighbours.shape
        (False, True, torch.Size([20, 5]))
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
        """Refresh after steps every, 2 x every, ...; returns whether it did."""
        if step == 0 or step % self.every:
            return False
        self.now(step)
        return True

    def now(self, step: int = 0) -> None:
        """Refresh at once, for example before the first epoch with hard batches."""
        vectors = Keys(self.vectors()).vectors.clone()  # training continues, and may overwrite the buffer
        if self.sampler.planner.needs != "graph":
            self.sampler.data = vectors
            return
        generator = torch.Generator(vectors.device).manual_seed((self.seed * 2**31 + step) % 2**63)
        build = partial(graph_of, vectors, self.num_neighbours, self.num_candidates, generator)
        self.sampler.data = self._aside(build, vectors.device) if vectors.is_cuda else build()

    def _aside(self, build: Callable[[], ProximityGraph], device: torch.device) -> Future[ProximityGraph]:
        """Build the graph in its own thread and CUDA stream, once the vectors are ready."""
        if self._thread is None or self._stream is None:
            # One stream for all graphs: freed memory is kept for its stream, so a new stream for each graph would
            # allocate from the device each time, which synchronises everything that runs there.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hardneg-graph")
            self._process = PlanningProcess()
        stream, ready = self._stream, torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))

        def work() -> ProximityGraph:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                graph = build()
                graph.digest  # noqa: B018, cached by the graph for the plan
            self._plan_next(graph)
            return graph

        return self._thread.submit(work)

    def _plan_next(self, graph: ProximityGraph) -> None:
        """Plan the segment that waits for this graph; without the subprocess, the sampler plans it itself."""
        if self._process is None:
            return
        try:
            self.sampler.plan_next(graph, self._process)
        except (EOFError, OSError, pickle.PickleError, AttributeError, TypeError):  # the last two: not picklable
            self._process = None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode, and return it to its mode afterwards."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _shown(loader: Iterable[Any], progress: bool) -> Iterable[Any]:
    """Return the loader, with a progress bar if wanted."""
    if not progress:
        return loader
    from rich.progress import track

    return track(loader, description="Encoding", total=len(loader) if isinstance(loader, Sized) else None)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the weights; the CPU for a module without weights."""
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")
