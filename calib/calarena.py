"""Export probabilities of trained runs in the layout that CalArena's run_benchmark.py reads."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from semix.calib.results import EvalSplit, MethodResult, load_methods
from semix.data.errors import InputError
from semix.data.installation import install_command

BENCHMARK_NAME = "semix"  # CalArena reads the kind of task from what is appended to it
COLUMNS = ("dataset", "model", "cal_size", "test_size", "n_classes")


def export_calarena(run: Path, folder: Path) -> list[Path]:
    """Write `semix-multiclass.h5`, or -binary for two classes, and its index of experiments.

    One stage of one seed is an experiment, `DATASET/RUN-STAGE-seedN`: calibrators are fitted on its
    validation images and evaluated on its test images.

    Returns:
        The paths of the two files.
    Raises:
        InputError: h5py is not installed, or the run is not measured; see `load_methods`.
    """
    h5py = _h5py()
    experiments = [each for method in load_methods([run]) for each in _experiments(method)]
    binary = experiments[0][2]["probas_test"].ndim == 1  # the same for all of one run
    name = f"{BENCHMARK_NAME}-{'binary' if binary else 'multiclass'}"
    folder.mkdir(parents=True, exist_ok=True)
    data, index = folder / f"{name}.h5", folder / f"{name}-experiments.csv"
    with h5py.File(data, "w") as file:
        for dataset, model, arrays in experiments:
            group = file.create_group(f"{dataset}/{model}")
            for array_name, values in arrays.items():
                group.create_dataset(array_name, data=values, compression="gzip")
    _write_index(index, experiments, COLUMNS[:-1] if binary else COLUMNS)
    return [data, index]


def _experiments(method: MethodResult) -> list[tuple[str, str, dict[str, np.ndarray]]]:
    """Dataset, model and arrays of every seed."""
    experiments = []
    for unit, result in method.seeds.items():
        arrays = {}
        splits: tuple[tuple[EvalSplit, str], ...] = (("validation", "cal"), ("test", "test"))
        for split, array_suffix in splits:
            logits, targets = result.predictions(split)
            p = logits.softmax(1).numpy().astype(np.float32)
            arrays[f"probas_{array_suffix}"] = p[:, 1] if p.shape[1] == 2 else p
            arrays[f"labels_{array_suffix}"] = targets.numpy().astype(np.int32)
        model = f"{_hdf5_name(method.run.name)}-{result.stage}-seed{unit.seed}"
        experiments.append((_hdf5_name(method.dataset), model, arrays))
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


def _hdf5_name(text: str) -> str:
    """A name without characters that have a meaning in the paths of an HDF5 file."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "data"


def _h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        remedy = f"needs h5py; run {install_command('export')}"
        raise InputError("export", "calarena", remedy) from error
    module: ModuleType = h5py
    return module
