"""What the runs of a study measured: one result a cell and seed, from the run folders alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from calib.run_folder import measured_as, refuse_differing, seed_evaluation
from calib.study.cells import Cell
from data.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

Split = Literal["test", "validation"]
Values = Mapping[str, float]  # by measure


@dataclass(frozen=True)
class Result:
    """The stage of one seed that is the method's result.

    Attributes:
        row: of evaluation.json.
        logits: the file of its logits.
    """

    row: Mapping[str, Any]
    logits: Path

    def values(self, split: Split, kind: str) -> Values | None:
        """Measures as trained ("plain") or after a post-hoc method; None if they are not there.

        Post-hoc methods are fitted on validation images, so those say nothing about them.
        """
        if split == "test":
            found: Values | None = self.row.get(kind)
            return found
        return self._validation if kind == "plain" else None

    def predictions(self, split: Split) -> "tuple[Tensor, Tensor]":
        """Logits [N, K] and targets [N]."""
        from safetensors.torch import load_file

        found = load_file(self.logits)
        return found[f"{split}_logits"], found[f"{split}_targets"]

    @property
    def bins(self) -> int:
        """Of the binned measures."""
        found: int = self.row["bins"]
        return found

    def images(self, split: Split) -> int:
        return len(self.predictions(split)[1])

    @cached_property
    def _validation(self) -> Values:
        from calib.metrics import calibration_metrics

        return calibration_metrics(*self.predictions("validation"), bins=self.bins).as_dict()


Results = dict[str, dict[int, Result]]  # by cell and seed


def read_results(cells: Sequence[Cell], out: Path) -> Results:
    """Every seed that is measured under the settings of its cell.

    Raises:
        InputError: a seed was trained under other settings.
    """
    return {cell.name: _of_cell(cell, cell.run(out)) for cell in cells}


def _of_cell(cell: Cell, run: Path) -> dict[int, Result]:
    found = {}
    for seed in cell.config.seeds:
        path = seed_evaluation(run, seed)
        evaluation = read_json(path) if path.is_file() else None
        if evaluation is not None:
            refuse_differing(evaluation["config"], cell.config.identity(), run)
        if evaluation is not None and measured_as(cell.config, evaluation):
            row = next(row for row in evaluation["rows"] if row["stage"] == cell.stage)
            found[seed] = Result(row, run / row["logits"])
    return found
