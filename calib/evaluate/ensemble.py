"""The ensemble of a run's seeds: the mean of their probabilities, each calibrated before."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from semix.calib.calibration import Calibration
from semix.calib.checkpoint import save_tensors
from semix.calib.config import TrainConfig
from semix.calib.evaluate.predictions import Load, TrainedSeed
from semix.calib.run_folder import StageName
from semix.calib.training_data import TrainingData
from semix.data.fingerprint import fingerprint

FOLDER = "ensemble"  # in a run, beside the folders of its seeds


@dataclass(frozen=True)
class SeedEnsemble:
    """All seeds of a run as one classifier, with what `TrainedSeed` has.

    Its logits are log mean_s softmax(z_s / T_s), where T_s is the temperature of seed s. Averaging
    makes probabilities less confident, so the ensemble is calibrated once more like any classifier.

    Attributes:
        members: the seeds.
        temperatures: of each member, by stage.

    Source: Lakshminarayanan et al. 2017, deep ensembles; calibrated before they are averaged, as
    Roschewitz et al. 2025 (arXiv 2507.07780) compare.
    """

    members: Sequence[TrainedSeed]
    temperatures: Sequence[Mapping[StageName, float]]
    seed: None = None
    is_main: bool = True
    accelerator: None = None

    @property
    def config(self) -> TrainConfig:
        return self.members[0].config

    @property
    def data(self) -> TrainingData:
        return self.members[0].data

    @property
    def run(self) -> Path:
        return self.members[0].run

    @property
    def stages(self) -> tuple[StageName, ...]:
        return self.members[0].stages

    @cached_property
    def sources(self) -> dict[StageName, str]:
        """The digest of what is behind each stage's predictions."""
        return {
            stage: fingerprint(
                [
                    [member.sources[stage], temperatures[stage]]
                    for member, temperatures in zip(self.members, self.temperatures, strict=True)
                ]
            )
            for stage in self.stages
        }

    def logits_file(self, stage: StageName) -> Path:
        return self.run / FOLDER / f"logits-{stage}.safetensors"

    def predict(self, load: Load, count: int, *, what: str) -> dict[StageName, Tensor]:
        """As `TrainedSeed.predict`."""
        each = [member.predict(load, count, what=what) for member in self.members]
        return {stage: self._mean([logits[stage] for logits in each], stage) for stage in each[0]}

    def logits(self, *, fresh: bool) -> dict[StageName, dict[str, Tensor]]:
        """As `TrainedSeed.logits`, from those that the members stored."""
        each = [member.logits(fresh=False) for member in self.members]
        averaged: dict[StageName, dict[str, Tensor]] = {}
        for stage in self.stages:
            averaged[stage] = {
                name: self._mean([tensors[stage][name] for tensors in each], stage)
                if name.endswith("_logits")
                else tensor
                for name, tensor in each[0][stage].items()
            }
            path = self.logits_file(stage)
            path.parent.mkdir(exist_ok=True)
            save_tensors(path, averaged[stage], metadata={"source": self.sources[stage]})
        return averaged

    def _mean(self, logits: Sequence[Tensor], stage: StageName) -> Tensor:
        scaled = [
            (each / temperatures[stage]).log_softmax(1)
            for each, temperatures in zip(logits, self.temperatures, strict=True)
        ]
        return torch.stack(scaled).logsumexp(0) - math.log(len(scaled))


def ensemble_of(
    members: Sequence[TrainedSeed], calibrations: Sequence[Mapping[StageName, Calibration]]
) -> SeedEnsemble:
    """The ensemble of these seeds, with what was fitted for each."""
    temperatures = [
        {stage: fitted.temperature for stage, fitted in of_seed.items()} for of_seed in calibrations
    ]
    return SeedEnsemble(members, temperatures)
