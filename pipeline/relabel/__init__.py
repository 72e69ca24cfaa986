"""Further labels for images that are there: plan a set, label a shard, bake a new root."""
