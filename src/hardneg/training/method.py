"""What a recipe is: the encoder that is trained, the loss of a batch, and what must survive a crash."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis
from hardneg.core.types import Keys
from hardneg.training.data.inputs import Inputs
from hardneg.training.data.items import Items, MinedRows
from hardneg.training.records import COLLAPSED_SIMILARITY

EncodeInputs = Callable[[Inputs], Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's part of a global batch: two views of each item."""

    views: Inputs  # [2b]: the first views, then the second ones
    ids: Tensor  # [b], positions in the data set
    labels: Tensor | None  # [b]
    mined: MinedRows | None = None  # negatives beside the batch, if the data has any

    @property
    def first(self) -> Inputs:
        return self.views[: len(self.ids)]

    @property
    def second(self) -> Inputs:
        return self.views[len(self.ids) :]


class Method(nn.Module, ABC):
    """What a recipe is. Everything that must survive a crash is in its ``state_dict``."""

    encoder: nn.Module
    """Trained and evaluated; ``encode`` below is the same, wrapped for the ranks."""
    loss: Any
    """A ``ContrastiveLoss``, unless ``diagnose`` and ``set_progress`` are replaced as well."""
    last: tuple[Any, ...]
    """The arguments of the loss of the last batch."""
    keys: Keys
    """Unit vectors of the last global batch."""

    collapsed_similarity: ClassVar[float] = COLLAPSED_SIMILARITY
    """The mean similarity of candidates from which a run may have collapsed."""

    def recorded_encoder(self) -> nn.Module:
        """The part of the encoder that a run records, so that methods can be compared by it."""
        return self.encoder

    def chosen(self) -> dict[str, int]:
        """What the recipe has worked out from the data for options that were not given; printed when a run begins."""
        return {}

    def prepare(self, how: Callable[[nn.Module], EncodeInputs]) -> None:
        """Applies ``how`` to encoders beside the trained one, so that they are called as it is: compiled, in chunks."""

    @abstractmethod
    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """The loss of a batch; sets ``last`` and ``keys``, or what replaces them in ``diagnose`` and ``harvest``."""

    def recorded(self, loss: Tensor) -> Tensor:
        """The loss to record, where that of ``loss_of`` is a surrogate whose value means nothing."""
        return loss

    def diagnose(self) -> Diagnosis:
        """How hard and how false the negatives of the last batch were."""
        found: Diagnosis = self.loss.diagnose(*self.last)
        return found

    def figures(self) -> dict[str, float]:
        """More figures of the last batch for the records, the same on all ranks."""
        return {}

    def harvest(self) -> Keys:
        """Unit vectors of the last global batch by id, for a graph."""
        return self.keys

    def set_progress(self, step: int, total: int) -> None:
        """Evaluates the schedules before a step."""
        self.loss.set_progress(step, total)

    def after_step(self) -> None:
        """Updates what follows the weights: a momentum encoder, a queue."""


Build = Callable[[Any, Items, int], Method]
"""Makes the method from its options, the data and the total number of steps."""
