"""SogCLR (Yuan et al. 2022): SimCLR against all images of the data set, through a running normaliser per image.

The gradient is that of the global loss; the value of the surrogate has no meaning, so the recorded loss is the real
one of the batch. Non-uniform ``negatives`` determine which candidates enter the normaliser, and with which weight.
``GlobalMethod`` is the base of this recipe and of EMC2 (emc2.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis
from hardneg.losses.contrastive import ContrastiveLoss
from hardneg.losses.global_softmax import Replayed, SogCLR
from hardneg.theory.gradients import global_loss
from hardneg.training.data.items import Items
from hardneg.training.loop.method import EncodeInputs
from hardneg.training.options import SogCLROptions, TrainOptions
from hardneg.training.recipes.simclr import SimCLR


class GlobalMethod(SimCLR):
    """Base of losses over the whole data set, which keep state per image.

    Every rank computes the loss of all gathered rows, so that all ranks hold the same state.

    Args:
        options: Options of the recipe; the temperature must be constant.
        data: The training items.
    """

    everywhere: ClassVar[bool] = True
    arguments: ClassVar[dict[str, Any]] = {"gather": False}

    def __init__(self, options: TrainOptions, data: Items) -> None:
        super().__init__(options, data, 0)
        self.of_batch: ContrastiveLoss = self.loss  # subclasses replace self.loss by a global one
        self.temperature = float(options.temperature)  # never a schedule: the options check it
        self.can_replay = options.compile  # the loss depends on nothing but the batch and its state
        self.replayed: Replayed | None = None

    def prepare(self, how: Callable[[nn.Module], EncodeInputs]) -> None:
        """Capture the loss as a CUDA graph when compiling, if it depends on the batch and its own state only."""
        self.replayed = Replayed(self.loss) if self.can_replay else None

    def loss_of_views(self, z1: Tensor, z2: Tensor, ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Return the surrogate loss of two views, each [b, d]."""
        return (self.replayed or self.loss)(z1, z2, ids, labels)

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the real loss of the batch instead of the surrogate."""
        real: Tensor = self.loss.last["real_loss"]
        return real

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Diagnose the negatives within the batch."""
        return self.of_batch.diagnose(*self.last, bins=bins)

    def global_loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the exact loss that the method estimates, without the positive in the denominator (EMC2, eq. 1)."""
        return global_loss(z1, z2, self.temperature, ids=index, positives_in_denominator="none")

    def set_progress(self, step: int, total: int) -> None:
        """Do nothing: the global loss has no schedules of its own."""


class SogCLRMethod(GlobalMethod):
    """SimCLR with a running normaliser per image.

    Args:
        options: Options of the recipe; ``gamma`` weighs new values in the normalisers.
        data: The training items.
        total: Number of steps of the run.
    """

    def __init__(self, options: SogCLROptions, data: Items, total: int) -> None:
        super().__init__(options, data)
        self.negatives = self.of_batch.negatives  # the same object, so that an adaptive schedule moves both
        self.can_replay &= self.negatives.closed_form() is not None  # others may have schedules, or draw
        self.loss = SogCLR(len(data), self.temperature, options.gamma, negatives=self.negatives)

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedules of the negatives before a step."""
        self.loss.negatives = self.negatives.at(step, total)
        self.of_batch.set_progress(step, total)
