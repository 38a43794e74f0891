"""A loss with the call of lightly's NTXentLoss, with any negatives.

loss = NegativesLoss("Tilt(1.0)", temperature=0.5)      # NTXentLoss(0.5) there
loss(out0, out1)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hardneg.core.distributed import gather, several_ranks
from hardneg.core.errors import argument_error
from hardneg.core.tensors import unit
from hardneg.core.types import Keys
from hardneg.integrations.ranks import distinct_ids, of_all_ranks
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives import Negatives, Uniform
from hardneg.state.pools import Queue


class NegativesLoss(nn.Module):
    """``Uniform()`` is NTXentLoss: SimCLR's, or with a memory bank MoCo's.

    memory_bank_size: (number of vectors, dimension), or 0 for none. It starts empty and not with random vectors, and
        is a ``Queue``: what it holds and where it is are in the ``state_dict``.
    gather_distributed: whether the candidates, or the vectors for the memory bank, are those of all ranks.
    The other options are those of ContrastiveLoss.
    """

    def __init__(
        self,
        negatives: Negatives | str = Uniform(),
        temperature: float = 0.5,
        memory_bank_size: int | tuple[int, int] = 0,
        gather_distributed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(memory_bank_size, int) and memory_bank_size:
            what = "(number of vectors, dimension) or 0"
            raise argument_error("NegativesLoss", what, "memory_bank_size", memory_bank_size)
        self.gather_distributed = gather_distributed
        self.queue = Queue(*memory_bank_size) if isinstance(memory_bank_size, (tuple, list)) else None
        self.loss = ContrastiveLoss(negatives, temperature, **options)

    def set_progress(self, step: int, total: int | None = None) -> None:
        """Evaluates the schedules."""
        self.loss.set_progress(step, total)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Views are projections of any norm; the second is pushed into the memory bank while training."""
        loss: Tensor
        if self.queue is not None:
            loss = self.loss(out0, out1, pool=self.queue)
            if out0.requires_grad:
                keys = Keys(unit(out1.detach()))
                self.queue.push(gather(keys) if self.gather_distributed else keys)
        elif self.gather_distributed and several_ranks():
            ids = distinct_ids(out0)
            pool = [of_all_ranks(view, ids) for view in (out0, out1)]
            loss = (self.loss(out0, out1, ids=ids, pool=pool) + self.loss(out1, out0, ids=ids, pool=pool)) / 2
        else:
            loss = self.loss(out0, out1)
        return loss
