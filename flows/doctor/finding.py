"""What one check found, and what to do about it."""

from dataclasses import dataclass

OK, WARNING, FAILED, UNCHECKED = "ok", "warning", "failed", "not checked"


@dataclass(frozen=True)
class Finding:
    """A row of the doctor's table.

    Attributes:
        state: ok, warning (a run may work), failed (it will not), or not checked.
        remedy: empty where nothing is to be done.
    """

    check: str
    state: str
    found: str
    remedy: str = ""
