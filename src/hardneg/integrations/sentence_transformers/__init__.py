"""sentence-transformers: its script with any negatives, ids and hard batches; docs/guides/sentence-transformers.md."""

from hardneg.integrations.sentence_transformers.batches import HardBatches as HardBatches
from hardneg.integrations.sentence_transformers.cached import CachedNegativesLoss as CachedNegativesLoss
from hardneg.integrations.sentence_transformers.callback import LossCallback as LossCallback
from hardneg.integrations.sentence_transformers.fresh import FreshNegatives as FreshNegatives
from hardneg.integrations.sentence_transformers.ids import known_positives as known_positives
from hardneg.integrations.sentence_transformers.ids import with_ids as with_ids
from hardneg.integrations.sentence_transformers.loss import NegativesLoss as NegativesLoss
