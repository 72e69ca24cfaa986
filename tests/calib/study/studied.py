"""A small study, and run folders with results that are known beforehand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from calib.checkpoint import save_tensors
from calib.metrics import calibration_metrics
from calib.run_folder import CONFIG, EVALUATION, SCHEMA, seed_evaluation, seed_folder
from calib.study import Cell
from data.files import write_json

STUDY: dict[str, Any] = {
    "name": "a study",
    "baseline": "ce",
    "seeds": [0, 1, 2],
    "base": {
        "real": {
            "name": "digits",
            "image_size": 16,
            "train_per_class": 6,
            "validation_per_class": 5,
        },
        "model": {"name": "resnet8", "width": 2},
        "epochs": 1,
        "batch_size": 20,
        "augment": {"shift": 1},
        "trackers": [],
        "evaluation": {"bootstrap": 0},
    },
    "datasets": {"digits": {}},
    "methods": {
        "ce": {"name": "CE"},
        "ls": {"overrides": {"loss": {"name": "ls"}}},
        "mac": {
            "name": "CE + MaC-Cal",
            "overrides": {"head": {"epochs": 2, "batch_size": 20, "views": 1}},
        },
    },
}


def random_predictions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [50, 10] that are right more often than not, and targets."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(10, (50,), generator=generator)
    logits = torch.randn(50, 10, generator=generator)
    logits[torch.arange(50), targets] += 1.5
    return logits, targets


def write_run(
    cell: Cell,
    out: Path,
    measured: Mapping[int, Mapping[str, Mapping[str, float]]],
    **row: Any,
) -> None:
    """A run folder as a trainer leaves it: by seed, figures over those of random predictions.

    Args:
        measured: by seed and kind ("plain", "scaled"), some measures.
        row: further entries of every row of evaluation.json.
    """
    run = cell.run(out)
    settings = cell.config.evaluation.model_dump(mode="json")
    measured_so = {"schema": SCHEMA, "evaluation": settings}
    rows = []
    for seed, kinds in measured.items():
        logits, targets = random_predictions(seed)
        path = seed_folder(run, seed) / f"logits-{cell.stage}.safetensors"
        tensors = {"logits": logits, "targets": targets}
        both = {
            f"{split}_{k}": v.clone()
            for split in ("validation", "test")
            for k, v in tensors.items()
        }
        save_tensors(path, both)
        plain = calibration_metrics(logits, targets).as_dict()
        found = {"stage": cell.stage, "seed": seed, "temperature": 1.0, "bins": 15, **row}
        found |= {"logits": path.relative_to(run).as_posix()}
        found |= {kind: {**plain, **kinds.get(kind, {})} for kind in ("plain", "scaled")}
        rows.append(found)
        evaluation = {"config": cell.config.identity(), "rows": [found]}
        write_json(seed_evaluation(run, seed), measured_so | evaluation)
    write_json(run / CONFIG, cell.config.model_dump(mode="json"))
    if len(measured) == len(cell.config.seeds):
        whole = {"digest": "d", "seconds": 90.0, "versions": {"torch": "9.1"}, "rows": rows}
        write_json(run / EVALUATION, measured_so | whole)
