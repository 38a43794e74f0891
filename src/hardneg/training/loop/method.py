"""The interface of a training recipe: the encoder to train, the loss of a batch, and the state of a checkpoint.

``Method`` is what the loop in ``training/loop/train.py`` trains; every file of ``training/recipes`` defines one.
``Batch`` is what it receives in each step, and ``Build`` the signature of its constructor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from hardneg.core.diagnose import Diagnosis
from hardneg.core.types import Keys
from hardneg.theory.gradients import global_loss
from hardneg.training.data.inputs import Inputs
from hardneg.training.data.items import Items, MinedRows
from hardneg.training.loop.records import COLLAPSED_SIMILARITY

EncodeInputs = Callable[[Inputs], Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's part of a global batch: two views of each item.

    Attributes:
        views: Inputs of 2b rows: the first views of all items, then the second ones.
        ids: Positions of the items in the data set, [b].
        labels: Labels of the items, [b], or None for data without labels.
        mined: Extra negatives of the batch, or None if the data has no mined negatives.
    """

    views: Inputs  # [2b]
    ids: Tensor  # [b]
    labels: Tensor | None  # [b]
    mined: MinedRows | None = None

    @property
    def first(self) -> Inputs:
        """The first views of the items, b rows."""
        return self.views[: len(self.ids)]

    @property
    def second(self) -> Inputs:
        """The second views of the items, b rows."""
        return self.views[len(self.ids) :]


class Method(nn.Module, ABC):
    """Abstract base of a recipe: an encoder, its loss, and how a step is computed.

    A subclass sets ``encoder`` and ``loss`` in its constructor and implements ``loss_of``. All state that must
    survive a crash must live in parameters, buffers or submodules, since a checkpoint stores ``state_dict()``.

    Each step calls ``set_progress``, ``loss_of``, the optimiser, ``after_step``; every ``--log-every`` steps
    ``diagnose``, ``figures`` and ``recorded`` make a record.

    Example::

        class MyMethod(Method):
            def __init__(self, options, data, total):
                super().__init__()
                self.encoder = data.encoder(options)
                self.loss = ContrastiveLoss(options.negatives, options.temperature)

            def loss_of(self, encode, batch):
                z1, z2 = encode(batch.views).chunk(2)
                self.last, self.keys = (z1, z2, batch.ids), Keys(normalize(z1).detach(), batch.ids)
                return self.loss(*self.last)
    """

    encoder: nn.Module
    """The module that is trained and evaluated; the ``encode`` of ``loss_of`` is this one, wrapped for the ranks."""
    loss: Any
    """A ``ContrastiveLoss``, or any loss if the subclass also overrides ``diagnose`` and ``set_progress``."""
    last: tuple[Any, ...]
    """Arguments with which the loss was called for the last batch."""
    keys: Keys
    """Unit vectors of the last global batch, of all ranks."""

    collapsed_similarity: ClassVar[float] = COLLAPSED_SIMILARITY
    """Mean similarity of candidates above which a run may have collapsed; see ``records.has_collapsed``."""

    def recorded_encoder(self) -> nn.Module:
        """Return the part of the encoder that config.json describes.

        Methods with extra modules, such as a predictor, override this, so that their encoders can be compared.
        """
        return self.encoder

    @classmethod
    def rebuilt(cls, kind: type[Items], record: dict[str, Any], options: Any) -> nn.Module:
        """Build the encoder of a finished run with fresh weights, without reading its data.

        By default it is the encoder of the data; methods that add modules to it, or train two, override this.

        Args:
            kind: Kind of the data.
            record: Record of the training items.
            options: Options of the run.
        """
        return kind.rebuilt(record, options)

    def chosen(self) -> dict[str, int]:
        """Return the values derived from the data for options that were not given, by name.

        They are printed when a run starts, such as the size of a queue.
        """
        return {}

    def prepare(self, how: Callable[[nn.Module], EncodeInputs]) -> None:
        """Wrap encoders other than the trained one, so that they are compiled and chunked like it.

        Args:
            how: Function that wraps an encoder as the options say and returns the callable to use instead.
        """

    @abstractmethod
    def loss_of(self, encode: EncodeInputs, batch: Batch) -> Tensor:
        """Compute the loss of a batch.

        Implementations also set ``last`` and ``keys``, which ``diagnose`` and ``harvest`` read, or override these.

        Args:
            encode: The trained encoder, wrapped for the device and the ranks; maps inputs to embeddings [rows, dim].
            batch: This rank's part of the batch.

        Returns:
            A scalar with a gradient.
        """

    def recorded(self, loss: Tensor) -> Tensor:
        """Return the loss to record for a step.

        Override it where ``loss_of`` returns a surrogate, whose gradient is right but whose value has no meaning.
        """
        return loss

    def diagnose(self, bins: int = 0) -> Diagnosis:
        """Return the diagnosis of the last batch: hardness, false-negative rate and more of its negatives.

        Args:
            bins: Number of bins of the histograms of similarities; 0 for none.
        """
        found: Diagnosis = self.loss.diagnose(*self.last, bins=bins)
        return found

    def global_loss(self, z1: Tensor, z2: Tensor, index: Tensor) -> Tensor:
        """Return the exact loss over a data set: InfoNCE with all other items as the negatives of each.

        Args:
            z1: Unit vectors of the first views of all items, [n, d].
            z2: Unit vectors of the second views, [n, d].
            index: Positions of the items, [n].
        """
        temperature = self.loss.temperature_now()
        return global_loss(z1, z2, temperature, "two" if self.loss.views == "two" else "cross", index)

    def figures(self) -> dict[str, float]:
        """Return additional figures of the last batch for its record, equal on all ranks."""
        return {}

    def harvest(self) -> Keys:
        """Return the embeddings of the last global batch by id, unit vectors from which batches are planned."""
        return self.keys

    def set_progress(self, step: int, total: int) -> None:
        """Evaluate the schedules of the loss before a step.

        Args:
            step: Number of steps that have been completed.
            total: Number of steps of the whole run.
        """
        self.loss.set_progress(step, total)

    def after_step(self) -> None:
        """Update state that follows the weights, such as a momentum encoder or a queue."""


Build = Callable[[Any, Items, int], Method]
"""Constructor of a method: its options, the training data, and the total number of steps."""
