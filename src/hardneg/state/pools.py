"""Candidates from outside the batch: ``Queue`` holds recent keys, ``Bank`` one vector per instance.

Both start empty: no random vectors stand in as negatives. Both return copies, so pushing between the loss and its
backward pass is safe, and both are the same on all ranks if all push the same keys (``core.distributed.gather``). Pass
them to a loss as ``pool=``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, check_range
from hardneg.core.tensors import unit
from hardneg.core.types import Keys
from hardneg.state.stateful import Stateful, Writes, check_count

_chunk = 2**24
"""Largest number of random keys held at once by a draw without replacement."""


class Queue(Stateful):
    """First in, first out: the keys of the last batches (MoCo).

    Accepts any batch size, also one that does not divide the capacity; of more rows than the capacity, the last ones
    stay. Rows pushed without ids get id -1 and match nothing. Labels are only returned when every row in the queue has
    one.

    Args:
        capacity: Largest number of rows.
        dim: Number of features.
        source: Name of the source, for distributions such as ``From``.
        dtype: Type of the vectors; by default float32, or wider once wider vectors are pushed.

    Example:
        >>> queue = Queue(capacity=4, dim=2)
        >>> len(queue.keys())
        0
        >>> queue.push(Keys(torch.eye(2), ids=torch.tensor([7, 8])))
        >>> queue.keys().ids.tolist()
        [7, 8]
    """

    vectors: Tensor
    ids: Tensor
    labels: Tensor
    labelled: Tensor
    pushed_at: Tensor
    count: Tensor
    head: Tensor
    widening: ClassVar = ("vectors",)
    shown: ClassVar = ("capacity", "dim")

    def __init__(self, capacity: int, dim: int, *, source: str = "queue", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        capacity, dim = check_count("Queue", "capacity", capacity), check_count("Queue", "dim", dim)
        self.capacity, self.dim, self.source, self.dtype = capacity, dim, source, dtype
        self.register_buffer("vectors", torch.zeros(capacity, dim, dtype=dtype or torch.float32))
        self.register_buffer("ids", torch.full((capacity,), -1))
        self.register_buffer("labels", torch.zeros(capacity, dtype=torch.long))
        self.register_buffer("labelled", torch.zeros(capacity, dtype=torch.bool))
        self.register_buffer("pushed_at", torch.zeros(capacity, dtype=torch.long))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("head", torch.tensor(0))  # slot of the next row

    def keys(self) -> Keys:
        """Return the rows in the order of their slots."""
        count = len(self)
        every, some = self.looked_up("labelled", _all_and_any)
        # True for an empty queue, too, so that OtherLabel accepts it.
        known = every or count == 0 or (some and bool(self.labelled[:count].all()))
        return Keys(
            self.vectors[:count].clone(),
            self.ids[:count].clone(),
            self.labels[:count].clone() if known else None,
            source=self.source,
        )

    @torch.no_grad()
    def push(self, keys: Keys | Annotated[Tensor, "n d"]) -> None:
        """Add rows, which replace the oldest ones.

        Args:
            keys: Vectors [n, d], or Keys with ids and labels.
        """
        keys = _shared("Queue.push", keys, self.dim)
        rows = min(len(keys), self.capacity)
        head = self.number("head")
        slots = torch.arange(head, head + rows, device=self.ids.device) % self.capacity
        newest = slice(len(keys) - rows, None)
        if (wide := _wide_enough(self.vectors, keys.vectors, self.dtype)) != self.vectors.dtype:
            self.vectors = self.vectors.to(wide)
        self.vectors[slots] = keys.vectors[newest].detach().to(self.vectors)
        self.ids[slots] = -1 if keys.ids is None else keys.ids[newest].to(self.ids)
        self.labels[slots] = 0 if keys.labels is None else keys.labels[newest].to(self.labels)
        every, some = self.looked_up("labelled", _all_and_any)
        if not every if keys.labels is not None else some:
            self.labelled[slots] = keys.labels is not None
        self.advance()
        self.pushed_at[slots] = self.step
        self.set_number("head", (head + rows) % self.capacity)
        self.set_number("count", min(len(self) + rows, self.capacity))

    def age(self) -> Annotated[Tensor, "n"]:
        """Return how many pushes ago each row was added; 0 for those of the last push."""
        return self.step - self.pushed_at[: len(self)]

    def __len__(self) -> int:
        return self.number("count")


class Bank(Stateful):
    """One vector per instance, by id: for instance discrimination, CMC, Local Aggregation and graphs.

    The first push sets an instance's vector; later ones set it to unit(momentum * old + (1 - momentum) * new). If a
    push holds several rows with one id, the last one counts.

    Args:
        num_instances: Size of the data set.
        dim: Number of features.
        momentum: Share of the old vector, in [0, 1).
        normalize: Whether to bring the stored vectors to unit norm.
        source: Name of the source, for distributions such as ``From``.
        seed: Seed of the draws.
        dtype: Type of the vectors; by default float32, or wider once wider vectors are pushed.

    Example:
        >>> bank = Bank(num_instances=5, dim=2, momentum=0.5)
        >>> bank.push(Keys(torch.eye(2), ids=torch.tensor([4, 0])))
        >>> bank.keys().ids.tolist()
        [0, 4]
        >>> bank.draw(torch.tensor([4]), k=2).ids.tolist()
        [[0, 0]]
    """

    vectors: Tensor
    labels: Tensor
    labelled: Tensor
    pushed_at: Tensor
    pushes: Tensor
    widening: ClassVar = ("vectors",)
    shown: ClassVar = ("num_instances", "dim", "momentum")

    def __init__(
        self,
        num_instances: int,
        dim: int,
        momentum: float = 0.0,
        *,
        normalize: bool = True,
        source: str = "bank",
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(seed)
        num_instances, dim = check_count("Bank", "num_instances", num_instances), check_count("Bank", "dim", dim)
        check_range("Bank", "momentum", momentum, 0.0, 1.0, open_high=True)
        self.num_instances, self.dim, self.momentum = num_instances, dim, momentum
        self.normalize, self.source, self.dtype = normalize, source, dtype
        self.register_buffer("vectors", torch.zeros(num_instances, dim, dtype=dtype or torch.float32))
        self.register_buffer("labels", torch.zeros(num_instances, dtype=torch.long))
        self.register_buffer("labelled", torch.zeros(num_instances, dtype=torch.bool))
        self.register_buffer("pushed_at", torch.full((num_instances,), -1))  # -1: not visited
        self.register_buffer("pushes", torch.tensor(0))

    @property
    def visited(self) -> Annotated[Tensor, "num_instances"]:
        """True for the instances that were pushed."""
        return self.pushed_at >= 0

    def keys(self) -> Keys:
        """Return all instances visited so far, in the order of their ids."""
        return self.of(self.visited.nonzero().squeeze(1))

    def of(self, ids: Annotated[Tensor, "n | b k"]) -> Keys:
        """Return the vectors of these instances, [n, d] or [b, k, d].

        An instance that was not visited, or a negative id, has a zero vector and id -1.
        """
        vectors, known = self.vectors_of(ids)
        slots, labels = ids.clamp(min=0), None
        if self.looked_up("labelled", _all_and_any)[1]:
            labels = self.labels[slots] if bool((self.labelled[slots] | ~known).all()) and bool(known.any()) else None
        return Keys(vectors, torch.where(known, ids, -1), labels, source=self.source)

    def vectors_of(self, ids: Annotated[Tensor, "n | b k"]) -> tuple[Tensor, Tensor]:
        """Return the vectors of these instances (0 for unknown ones), and which are known."""
        known = self.contains(ids)
        return self.vectors[ids.clamp(min=0)] * known[..., None], known

    def contains(self, ids: Annotated[Tensor, "n | b k"]) -> Annotated[Tensor, "n | b k"]:
        """Return which of these instances were visited; False for negative ids."""
        return (ids >= 0) & self.visited[ids.clamp(min=0)]

    @torch.no_grad()
    def push(self, keys: Keys) -> None:
        """Update the instances of these rows; rows with a negative id are skipped.

        Args:
            keys: Vectors [n, d] with ids.
        """
        keys = _shared("Bank.push", keys, self.dim)
        ids = self.checked("Bank.push", keys.ids, self.num_instances).to(self.pushed_at.device)
        if (wide := _wide_enough(self.vectors, keys.vectors, self.dtype)) != self.vectors.dtype:
            self.vectors = self.vectors.to(wide)
        writes, new, slots = Writes(ids), keys.vectors.detach().to(self.vectors), ids.clamp(min=0)
        if self.momentum:
            seen = self.visited[slots][:, None]
            new = torch.where(seen, self.momentum * self.vectors[slots] + (1.0 - self.momentum) * new, new)
        writes.into(self.vectors, unit(new) if self.normalize else new)
        if keys.labels is not None:
            writes.into(self.labels, keys.labels)
            if not self.looked_up("labelled", _all_and_any)[0]:
                writes.into(self.labelled, torch.ones_like(ids))
        writes.into(self.pushed_at, self.pushes.expand(len(ids)))
        self.pushes += 1

    def draw(
        self, ids: Annotated[Tensor, "b"], k: int, *, replace: bool = True, generator: torch.Generator | None = None
    ) -> Keys:
        """Draw k instances for each anchor, uniformly from the other visited ones, as private candidates [b, k, d].

        The arguments are those of ``draw_ids``.
        """
        return self.of(self.draw_ids(ids, k, replace=replace, generator=generator))

    def draw_ids(
        self, ids: Annotated[Tensor, "b"], k: int, *, replace: bool = True, generator: torch.Generator | None = None
    ) -> Annotated[Tensor, "b k"]:
        """Draw the ids of k instances for each anchor, uniformly from the other visited ones.

        Args:
            ids: Ids of the anchors, [b].
            k: Number of draws per anchor. If some anchor has fewer others (without replacement), or none at all, k
                becomes the number that every anchor has.
            replace: Whether to draw with replacement.
            generator: Random generator; by default the bank's seed and step, which the call advances.

        Returns:
            Ids [b, k].
        """
        k = check_count("Bank.draw", "k", k)
        self.checked("Bank.draw", ids, self.num_instances)
        if generator is None:
            generator = self.generator()
            self.advance()
        pool, anchors = self.visited.nonzero().squeeze(1).cpu(), ids.cpu()
        own = torch.searchsorted(pool, anchors)
        inside = self.visited.cpu()[anchors.clamp(min=0)] & (anchors >= 0)
        room = len(pool) - inside.long()
        fewest = int(room.min()) if len(room) else 0
        k = min(k, fewest) if not replace or fewest == 0 else k
        index = (_with_replacement if replace else _without_replacement)(own, room, inside, k, generator)
        return pool[index].to(self.pushed_at.device)

    def age(self) -> Annotated[Tensor, "n"]:
        """Return how many pushes ago each visited instance was last updated."""
        return self.pushes - 1 - self.pushed_at[self.visited]

    def __len__(self) -> int:
        return int(self.visited.sum())


def _all_and_any(mask: Tensor) -> tuple[bool, bool]:
    return bool(mask.all()), bool(mask.any())


def _with_replacement(own: Tensor, room: Tensor, inside: Tensor, k: int, generator: torch.Generator) -> Tensor:
    uniforms = torch.rand(len(own), k, generator=generator, dtype=torch.float64)
    index = (uniforms * room[:, None]).long()
    return index + (inside[:, None] & (index >= own[:, None]))  # steps over the anchor itself


def _without_replacement(own: Tensor, room: Tensor, inside: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """The k largest of one random key per instance, a few rows at a time."""
    total = int((room + inside).max()) if len(own) else 0
    rows = max(_chunk // max(total, 1), 1)
    parts = [own.new_zeros(0, k)]
    for start in range(0, len(own), rows):
        mine = slice(start, start + rows)
        keys = torch.rand(len(own[mine]), total, generator=generator, dtype=torch.float64)
        here = inside[mine].nonzero().squeeze(1)
        keys[here, own[mine][here]] = -1.0  # the anchor itself comes last
        parts.append(keys.topk(k, dim=-1).indices)
    return torch.cat(parts)


def _wide_enough(store: Tensor, pushed: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.promote_types(torch.promote_types(store.dtype, pushed.dtype), torch.float32)


def _shared(who: str, keys: Keys | Tensor, dim: int) -> Keys:
    keys = keys if isinstance(keys, Keys) else Keys(keys)
    if keys.private or keys.dim != dim:
        raise argument_error(who, f"vectors [n, {dim}]", "vectors", tuple(keys.vectors.shape))
    return keys
