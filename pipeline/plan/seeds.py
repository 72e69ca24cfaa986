"""Seeds by hashing: of a plan seed and what the seed is for, never of a rank or an order."""

import hashlib


def hashed_seed(*parts: object) -> int:
    """A seed for these parts, as `hashed_seed(plan.seed, group)`; a non-negative int64."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch wants a non-negative int64
