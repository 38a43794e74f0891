"""Train sentence-transformers with any negatives, ids, hard batches and fresh negatives.

Everything fits the trainer of that library; see docs/guides/sentence-transformers.md. In reading order: ``ids.py``
numbers queries and documents (`with_ids`), ``pairings.py`` builds anchors and candidates from a batch, ``loss.py``
has the losses, ``callback.py`` saves their state, ``batches.py`` plans batches, ``fresh.py`` mines during training.
"""

from hardneg.integrations.sentence_transformers.batches import HardBatches as HardBatches
from hardneg.integrations.sentence_transformers.callback import LossCallback as LossCallback
from hardneg.integrations.sentence_transformers.fresh import FreshNegatives as FreshNegatives
from hardneg.integrations.sentence_transformers.ids import known_positives as known_positives
from hardneg.integrations.sentence_transformers.ids import with_ids as with_ids
from hardneg.integrations.sentence_transformers.loss import CachedNegativesLoss as CachedNegativesLoss
from hardneg.integrations.sentence_transformers.loss import NegativesLoss as NegativesLoss
