"""Mixed datasets as training samples: random access and draws, or epochs of batches."""

from data.mixed.dataset import MixedDataset
from data.mixed.loader import MixedBatch, MixedLoader
from data.mixed.order import generator_for
from data.mixed.pinned import shard_urls

__all__ = ["MixedBatch", "MixedDataset", "MixedLoader", "generator_for", "shard_urls"]
