"""Run folders with results that are known beforehand: of single runs, and of a small study."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from semix.calib.checkpoint import save_tensors
from semix.calib.metrics import calibration_metrics
from semix.calib.run_folder import CONFIG, EVALUATION, SCHEMA, seed_evaluation_path, seed_folder
from semix.calib.shown_measures import measures_in
from semix.calib.study import Cell
from semix.data.files import write_json

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
            "overrides": {"head": {"epochs": 2, "batch_size": 20, "augment": True, "views": 1}},
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
    metrics: Mapping[int, Mapping[str, Mapping[str, float]]],
    **extra: Any,
) -> None:
    """Write a run folder as a trainer leaves it: `metrics` over those of random predictions.

    Args:
        metrics: some measures per seed and kind ("plain", "scaled").
        extra: further entries of every row of evaluation.json.
    """
    run = cell.run(out)
    settings = cell.config.evaluation.model_dump(mode="json")
    header = {"schema": SCHEMA, "evaluation": settings}
    rows = []
    for seed, kinds in metrics.items():
        logits, targets = random_predictions(seed)
        path = seed_folder(run, seed) / f"logits-{cell.stage}.safetensors"
        tensors = {"logits": logits, "targets": targets}
        by_split = {
            f"{split}_{k}": v.clone()
            for split in ("validation", "test")
            for k, v in tensors.items()
        }
        save_tensors(path, by_split)
        plain = calibration_metrics(logits, targets).as_dict()
        row = {"stage": cell.stage, "seed": seed, "temperature": 1.0, "bins": 15, **extra}
        row |= {"logits": path.relative_to(run).as_posix()}
        row["kinds"] = {k: {**plain, **kinds.get(k, {})} for k in ("plain", "scaled")}
        rows.append(row)
        evaluation = {"config": cell.config.identity(), "rows": [row]}
        write_json(seed_evaluation_path(run, seed), header | evaluation)
    write_json(run / CONFIG, cell.config.model_dump(mode="json"))
    if len(metrics) == len(cell.config.seeds):
        summary = {"digest": "d", "seconds": 90.0, "versions": {"torch": "9.1"}, "rows": rows}
        write_json(run / EVALUATION, header | summary)


# Single runs

NAUGHTY = '<b>&"'


def measures(**values: float) -> dict[str, float]:
    keys = [measure.key for table in ("page", "selective") for measure in measures_in(table)]
    return {key: values.get(key, 0.5) for key in [*keys, "classwise_ece"]}


def make_run(
    folder: Path,
    name: str,
    values: list[dict[str, float]],
    *,
    head: str | None = None,
    real: tuple[str, str] = ("digits", "e" * 64),
) -> Path:
    """A finished run with one seed for each entry of `values`; scaling halves its ECE.

    Args:
        head: method of its second stage.
        real: name and digest of its real images.
    """
    rows = []
    for seed, metrics in enumerate(values):
        for stage in ("base", "head") if head else ("base",):
            logits = f"seed-{seed}/logits-{stage}.safetensors"
            (folder / logits).parent.mkdir(parents=True, exist_ok=True)
            tensors = {
                f"{split}_{kind}": value
                for split in ("validation", "test")
                for kind, value in (
                    ("logits", torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])),
                    ("targets", torch.tensor([0, 1, 1])),
                )
            }
            save_tensors(folder / logits, tensors)
            plain = measures(**metrics)
            scaled = {**plain, "ece": plain["ece"] / 2}
            row = {"stage": stage, "seed": seed, "temperature": 1.5 + seed, "logits": logits}
            rows.append({**row, "bins": 15, "kinds": {"plain": plain, "scaled": scaled}})
    evaluation = {"schema": SCHEMA, "name": name, "digest": "d" * 64, "seconds": 65.0, "rows": rows}
    evaluation["versions"] = {"torch": "2.15.0"}
    config = {"name": name, "mixed": {"weight": 1.0} if "CSM" in name else None, "epochs": 3}
    config |= {"head": head and {"method": head}, "real": {"name": real[0], "path": None}}
    for file, content in (("evaluation", evaluation), ("config", config)):
        (folder / f"{file}.json").write_text(json.dumps(content))
    (folder / "data.json").write_text(json.dumps({"real": real[1], "mixed": None}))
    return folder


def make_runs(folder: Path) -> list[Path]:
    ce = [
        {"accuracy": 0.90, "ece": 0.04, "nll": 0.3},
        {"accuracy": 0.92, "ece": 0.06, "nll": 0.5},
    ]
    csm = [
        {"accuracy": 0.92, "ece": 0.02, "nll": 0.5},
        {"accuracy": 0.92, "ece": 0.05, "nll": 0.6},
    ]
    return [make_run(folder / "ce", "CE", ce), make_run(folder / "csm", "CSM", csm, head="mac_cal")]


SHIFT_CELL = {"accuracy": 0.7, "ece": 0.12, "scaled_ece": 0.08, "nll": 1.0, "brier": 0.4}
SHIFT = {
    "bins": 10,
    "images": 1200,
    "mean": SHIFT_CELL,
    "corruptions": {"fog": {"1": SHIFT_CELL, "3": SHIFT_CELL, "mean": SHIFT_CELL}},
}
OOD_CELL = {"auroc": 0.91, "fpr95": 0.4, "entropy_auroc": 0.92, "entropy_fpr95": 0.38}


LIMITS = {key: [0.1, 0.2] for key in ("accuracy", "ece", "adaptive_ece", "nll", "brier")}
OOD = {NAUGHTY: {"images": 7, **OOD_CELL}, "mean": {**OOD_CELL, "fpr95": 0.45}}


def change_rows(run: Path, *, kinds: Mapping[str, object] | None = None, **fields: object) -> None:
    """Add fields, and kinds of calibration, to every row of a run's evaluation."""
    path = run / "evaluation.json"
    evaluation = json.loads(path.read_text())
    rows = evaluation["rows"]
    evaluation["rows"] = [{**r, "kinds": {**r["kinds"], **(kinds or {})}, **fields} for r in rows]
    path.write_text(json.dumps(evaluation))
