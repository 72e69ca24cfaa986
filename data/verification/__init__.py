"""Whether a root is what its records say: nothing missing, cut, changed or unreadable."""

from data.verification.problem import Problem
from data.verification.verify import verify

__all__ = ["Problem", "verify"]
