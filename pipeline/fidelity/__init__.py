"""The gate that approximate images pass before a build makes them in earnest."""

import json
from typing import Any

from data.errors import InputError
from data.root import FIDELITY, Root
from data.schemas import read_verdict
from pipeline.config import ApproximationConfig
from pipeline.root import plan_of

FIELD = "generator.approximate"
Verdict = dict[str, Any]


def ensure_fidelity(root: Root, *, device: str = "auto") -> Verdict | None:
    """Compare approximate with exact images of some series, once, into fidelity.json.

    Needs the root's prototypes. Nothing to do, and None, where no approximation is on.

    Raises:
        InputError: a criterion is not met and `accept_failure` is off, now or when measured.
    """
    plan = plan_of(root)
    settings = plan.config.generator.approximate
    if not settings.active:
        return None
    if not root.store.exists(FIDELITY):
        from pipeline.fidelity.gate import load_recipes, measure_fidelity

        verdict = measure_fidelity(plan, load_recipes(root, plan, device=device))
        verdict["recipe"] = recipe(settings)
        root.store.create(FIDELITY, json.dumps(verdict, indent=1).encode())
    verdict = read_verdict(root.store.get(FIDELITY))  # another process may have been first
    if not (verdict["passed"] or settings.accept_failure):
        raise InputError(FIELD, _named(verdict["recipe"]), _failure(verdict))
    return verdict


def recipe(settings: ApproximationConfig) -> dict[str, Any]:
    """The options that are switched on."""
    off = ApproximationConfig().model_dump(mode="json")
    off |= {"gate_groups": settings.gate_groups, "accept_failure": settings.accept_failure}
    return {
        key: value for key, value in settings.model_dump(mode="json").items() if value != off[key]
    }


def _named(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _failure(verdict: Verdict) -> str:
    worst = next(criterion for criterion in verdict["criteria"] if not criterion["passed"])
    figures = ", ".join(
        f"{words} {worst[key]:.3g}"
        for key, words in (("exact", "exact"), ("fast", "fast"), ("other", "other seeds"))
        if worst[key] is not None
    )
    return (
        f"the images fail the fidelity gate on {verdict['groups']} series: {worst['name']} is off "
        f"by {worst['distance']:.3g}, allowed {worst['limit']:.3g} ({figures}); switch it off, or "
        f"set {FIELD}.accept_failure: true, in a new place"
    )
