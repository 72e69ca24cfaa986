"""Which calibrator fits best: its NLL on validation images that it was not fitted on."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semix.calib.calibrators import CALIBRATORS, PLAIN
from semix.calib.checkpoint import load_tensors, read_metadata
from semix.calib.run_folder import StageName, logits_file, report_damage, seed_folder
from semix.data.files import read_json, write_json

FOLDS = 5
SCHEMA = 1  # of the file; another one is made anew
log = logging.getLogger("semix.calib")


def cross_fitted_nll(
    run: Path, seed: int, stage: StageName, names: Sequence[str]
) -> dict[str, float]:
    """Mean NLL on a seed's validation images by calibrator, each fitted on the other folds.

    As trained, nothing is fitted. Calibrators that have seen mixed images are left out. What was
    computed is kept in the seed's folder, because a thousand classes take minutes.

    Raises:
        InputError: the seed's logits or what was kept are damaged.
    """
    path = seed_folder(run, seed) / f"cross-fitted-{stage}.json"
    stored = logits_file(run, seed, stage)
    source = read_metadata(stored).get("source", "")
    known = _read(path, source)
    own = [name for name in names if not CALIBRATORS[name].with_mixed]
    missing = [name for name in (PLAIN, *own) if name not in known]
    if missing:
        tensors = load_tensors(stored)
        logits, targets = tensors["validation_logits"], tensors["validation_targets"]
        with _quiet():
            known |= {name: _cross_fitted(name, logits, targets) for name in missing}
        with suppress(OSError):  # a run that may only be read
            write_json(path, {"schema": SCHEMA, "source": source, "nll": known})
    return {name: known[name] for name in (PLAIN, *own)}


def _read(path: Path, source: str) -> dict[str, float]:
    if not path.is_file():
        return {}
    with report_damage(path):
        content: dict[str, Any] = read_json(path)
        same = (content["schema"], content["source"]) == (SCHEMA, source)
        return dict(content["nll"]) if same else {}


def _cross_fitted(name: str, logits: Tensor, targets: Tensor) -> float:
    if name == PLAIN:
        return nn.functional.cross_entropy(logits.double(), targets).item()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    total = 0.0
    for fold in order.chunk(FOLDS):
        others = torch.ones(len(targets), dtype=torch.bool)
        others[fold] = False
        fitted = CALIBRATORS[name].fit(logits[others], targets[others], None)
        calibrated = fitted(logits[fold]).double()
        total += nn.functional.cross_entropy(calibrated, targets[fold], reduction="sum").item()
    return total / len(targets)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the calibrators' warnings: what they say of a fold says nothing of the classifier."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
