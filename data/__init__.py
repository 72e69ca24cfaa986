"""What an image, a label, a shard and a store are. Imports none of the other packages."""
