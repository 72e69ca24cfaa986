"""One trained seed: its classifiers, loaded when needed, and the logits that it left."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from calib.checkpoint import read_metadata, save_tensors
from calib.classifier import Stage, load_classifier
from calib.config import TrainConfig
from calib.evaluation.predicting import Load, images_of, predict_all
from calib.run_folder import HEAD, MODEL, run_digest, seed_folder
from calib.training_data import TrainingData
from data.errors import InputError
from data.fingerprint import file_digest, fingerprint

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class TrainedSeed:
    """The stages of one seed, measured in this process or together with others."""

    config: TrainConfig
    data: TrainingData
    run: Path
    seed: int
    device: torch.device
    accelerator: "Accelerator | None" = field(default=None, repr=False)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return ("base",) if self.config.head is None else ("base", "head")

    @property
    def is_main(self) -> bool:
        return self.accelerator is None or self.accelerator.is_main_process

    @cached_property
    def classifiers(self) -> dict[Stage, nn.Module]:
        """Raises InputError for a stage that is not trained."""
        return {stage: load_classifier(self.run, self.seed, stage) for stage in self.stages}

    @cached_property
    def sources(self) -> dict[Stage, str]:
        """What each stage's predictions come from: settings, data and weights, as a digest."""
        digest, folder = run_digest(self.config, self.data.record), seed_folder(self.run, self.seed)
        files = {"base": (MODEL,), "head": (MODEL, HEAD)}
        return {
            stage: fingerprint([digest, *(file_digest(folder / name) for name in files[stage])])
            for stage in self.stages
        }

    def logits_file(self, stage: Stage) -> Path:
        return seed_folder(self.run, self.seed) / f"logits-{stage}.safetensors"

    def predict(self, load: Load, count: int, *, what: str) -> dict[Stage, Tensor]:
        """Logits [N, K] of each stage for the same images.

        Args:
            what: the images, for the message.
        Raises:
            InputError: a logit is not finite.
        """
        found = predict_all(
            [self.classifiers[stage] for stage in self.stages],
            load,
            count,
            num_classes=self.data.num_classes,
            device=self.device,
            accelerator=self.accelerator,
        )
        for stage, logits in zip(self.stages, found, strict=True):
            bad = (~logits.isfinite()).any(1).nonzero()
            if len(bad):
                place = f"{self.run} seed {self.seed} stage {stage}"
                remedy = f"gives NaN or infinite logits for {len(bad)} of {count} {what} images"
                raise InputError("run", place, f"{remedy}; train it with a lower learning rate")
        return dict(zip(self.stages, found, strict=True))

    def logits(self, *, fresh: bool) -> dict[Stage, dict[str, Tensor]]:
        """Logits and targets of validation and test, from disk if they came from these weights.

        The main process writes what was missing.

        Args:
            fresh: run the classifiers whatever is there.
        """
        files = {stage: self.logits_file(stage) for stage in self.stages}
        fits = all(
            read_metadata(path).get("source") == self.sources[stage]
            for stage, path in files.items()
        )
        if fits and not fresh:
            return {stage: load_file(path) for stage, path in files.items()}
        tensors: dict[Stage, dict[str, Tensor]] = {stage: {} for stage in self.stages}
        for name in ("validation", "test"):
            split = getattr(self.data.real, name)
            for stage, logits in self.predict(images_of(split), len(split), what=name).items():
                tensors[stage][f"{name}_logits"] = logits
                tensors[stage][f"{name}_targets"] = torch.from_numpy(split.targets)
        if self.is_main:
            for stage, path in files.items():
                save_tensors(path, tensors[stage], metadata={"source": self.sources[stage]})
        return tensors
