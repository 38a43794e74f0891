"""A loss that replaces lightly's NTXentLoss and accepts any negatives.

Example::

    loss = NegativesLoss("Tilt(1.0)", temperature=0.5)  # instead of NTXentLoss(0.5)
    loss(out0, out1)

See docs/guides/lightly-and-open-clip.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hardneg.core.distributed import gather, several_ranks
from hardneg.core.errors import argument_error
from hardneg.core.tensors import typed_as, unit
from hardneg.core.types import Keys
from hardneg.integrations.ranks import distinct_ids, of_all_ranks
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.negatives import Negatives, Uniform
from hardneg.state.pools import Queue


class NegativesLoss(nn.Module):
    """Contrastive loss with the call of lightly's NTXentLoss.

    With ``Uniform()`` it equals NTXentLoss: the loss of SimCLR, or with a memory bank that of MoCo.

    Args:
        negatives: Distribution over negatives, as an object or in the grammar.
        temperature: Similarities are divided by it.
        memory_bank_size: (number of vectors, dimension), or 0 for no memory bank. The bank is a ``Queue``: it starts
            empty rather than with random vectors, and its contents and position are part of the ``state_dict``.
        gather_distributed: Use the views of all ranks as candidates, or push those of all ranks into the memory bank.
        **options: Further options of ``ContrastiveLoss``.

    Raises:
        ArgumentError: ``memory_bank_size`` is a number other than 0, which leaves the dimension open.
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
        """Set the schedules to their values at ``step`` of ``total`` steps."""
        self.loss.set_progress(step, total)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Return the mean loss of two views.

        Args:
            out0: Projections of the first view, [b, d], of any norm.
            out1: Projections of the second view, [b, d]. During training they enter the memory bank after the loss.
        """
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

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self) -> Any:
            """Return what ``forward`` returns."""
