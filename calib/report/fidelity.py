"""What the fidelity gate found of a mixed dataset's approximate images, as text."""

from dataclasses import dataclass
from typing import Any

from data.root import FIDELITY, Root
from data.schemas import read_verdict

DIFFERENCE = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class Fidelity:
    """One verdict; each row is a criterion: name, exact, fast, other seeds, limit, result."""

    options: str
    passed: bool
    groups: int
    speedup: str
    rows: list[tuple[str, str, str, str, str, str]]
    diagnostics: str


def read_fidelity(url: str) -> Fidelity | None:
    """The verdict in a mixed dataset's root; None where its images are exact."""
    store = Root(url).store
    if not store.exists(FIDELITY):
        return None
    verdict = read_verdict(store.get(FIDELITY))
    return Fidelity(
        options=", ".join(f"{key} {value}" for key, value in verdict["recipe"].items()),
        passed=verdict["passed"],
        groups=verdict["groups"],
        speedup=f"{verdict['speedup']:.2f}",
        rows=[_row(criterion) for criterion in verdict["criteria"]],
        diagnostics=_diagnostics(verdict["diagnostics"]),
    )


def _row(criterion: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    exact, fast, other, limit = (criterion[key] for key in ("exact", "fast", "other", "limit"))
    # A figure of one set lies around the exact one; a distance to the exact set has no exact one.
    bound = f"at most {limit:.3g}" if exact is None else f"exact {DIFFERENCE} {limit:.3g}"
    return (
        criterion["name"],
        "" if exact is None else f"{exact:.3g}",
        f"{fast:.3g}",
        f"{other:.3g}",
        bound,
        "passed" if criterion["passed"] else "failed",
    )


def _diagnostics(found: dict[str, Any]) -> str:
    noise, middle, high = (
        found[key] for key in ("psnr_db_median", "weight_change_median", "weight_change_95")
    )
    likeness = "the same" if noise is None else f"{noise:.1f} dB PSNR"
    return (
        f"median image {likeness}; weight moved by {middle:.3f} in the median, {high:.3f} at the "
        f"95th percentile"
    )
