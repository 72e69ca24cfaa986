"""A pinned mixed dataset in formats that other programs read; the root stays as it is."""
