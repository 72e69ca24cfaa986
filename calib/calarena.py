"""Probabilities of trained runs in the layout that CalArena's own run_benchmark.py reads."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from semix.calib.results import EvalSplit, MethodResult, load_methods
from semix.data.errors import InputError
from semix.data.installation import install_command

NAME = "semix"  # of the benchmark; CalArena reads the kind of task from its ending
COLUMNS = ("dataset", "model", "cal_size", "test_size", "n_classes")


def export_calarena(run: Path, folder: Path) -> list[Path]:
    """Write `semix-multiclass.h5`, or -binary for two classes, and its index of experiments.

    A stage of a seed is one experiment, `DATASET/RUN-STAGE-seedN`: calibrators are fitted on its
    validation images and evaluated on its test images.

    Returns:
        The paths of the two files.
    Raises:
        InputError: h5py is not installed, or the run is not measured, see `load_methods`.
    """
    h5py = _h5py()
    experiments = [each for method in load_methods([run]) for each in _experiments(method)]
    binary = experiments[0][2]["probas_test"].ndim == 1  # the same for all of one run
    name = f"{NAME}-{'binary' if binary else 'multiclass'}"
    folder.mkdir(parents=True, exist_ok=True)
    data, index = folder / f"{name}.h5", folder / f"{name}-experiments.csv"
    with h5py.File(data, "w") as file:
        for dataset, model, parts in experiments:
            group = file.create_group(f"{dataset}/{model}")
            for part, values in parts.items():
                group.create_dataset(part, data=values, compression="gzip")
    _write_index(index, experiments, COLUMNS[:-1] if binary else COLUMNS)
    return [data, index]


def _experiments(method: MethodResult) -> list[tuple[str, str, dict[str, np.ndarray]]]:
    """The dataset, model and arrays of every seed."""
    experiments = []
    for unit, measured in method.seeds.items():
        parts = {}
        splits: tuple[tuple[EvalSplit, str], ...] = (("validation", "cal"), ("test", "test"))
        for split, short in splits:
            logits, targets = measured.predictions(split)
            p = logits.softmax(1).numpy().astype(np.float32)
            parts[f"probas_{short}"] = p[:, 1] if p.shape[1] == 2 else p
            parts[f"labels_{short}"] = targets.numpy().astype(np.int32)
        model = f"{_plain(method.run.name)}-{measured.stage}-seed{unit.seed}"
        experiments.append((_plain(method.dataset), model, parts))
    return experiments


def _write_index(
    path: Path,
    experiments: Sequence[tuple[str, str, dict[str, np.ndarray]]],
    columns: Sequence[str],
) -> None:
    from pandas import DataFrame  # takes a second to import

    rows = [
        (dataset, model, len(p["probas_cal"]), len(p["probas_test"]), p["probas_test"].shape[-1])
        for dataset, model, p in experiments
    ]
    frame = DataFrame(rows, columns=list(COLUMNS))
    frame[list(columns)].to_csv(path, index=False)


def _plain(text: str) -> str:
    """A name without the characters that separate paths in an HDF5 file."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "data"


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        remedy = f"needs h5py; run {install_command('export')}"
        raise InputError("export", "calarena", remedy) from error
    module: ModuleType = h5py
    return module
