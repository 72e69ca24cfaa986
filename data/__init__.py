"""Images, labels, shards and stores. Imports none of the other packages."""
