"""Logits of a trained seed, predicted in chunks by all processes, or read from disk."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from semix.calib.calibrators import CALIBRATORS
from semix.calib.checkpoint import load_tensors, read_metadata, save_tensors
from semix.calib.config import TrainConfig
from semix.calib.network import CHUNK, StageClassifiers, load_stages
from semix.calib.processes import broadcast_from_main, wait_for_all
from semix.calib.real_images import ranges
from semix.calib.run_folder import HEAD, MODEL, StageName, logits_file, run_digest, seed_folder
from semix.calib.training_data import TrainingData
from semix.data.device import float32_precision
from semix.data.errors import InputError
from semix.data.fingerprint import derived_seed, file_digest, fingerprint

Load = Callable[[Sequence[Tensor]], Generator[Tensor, None, None]]  # as `ImageSource.chunks`


@torch.no_grad()
@float32_precision("ieee")
def predict_all(
    classifiers: StageClassifiers,
    load: Load,
    count: int,
    *,
    num_classes: int,
    device: torch.device,
    accelerator: Accelerator | None = None,
) -> Tensor:
    """Logits of several stages for the same images, which are loaded once.

    Each process predicts whole chunks, the same chunks as a single process would, then gathers
    those of the others: all processes must call this, and all get the complete logits in order.

    Args:
        classifiers: of C stages, on any device, in eval mode; they are moved to `device`.
        load: yields the images of each tensor of indices in turn, uint8 [n, S, S, 3].
    Returns:
        float32 [C, N, K] on the CPU.
    """
    processes = 1 if accelerator is None else accelerator.num_processes
    process = 0 if accelerator is None else accelerator.process_index
    per_process = math.ceil(math.ceil(count / CHUNK) / processes) * CHUNK  # images
    all_logits = torch.zeros(per_process, 1 + len(classifiers.heads), num_classes)
    classifiers.to(device)
    indices = ranges(process * per_process, min(count, (process + 1) * per_process), CHUNK)
    with closing(load(indices)) as chunks:
        for start, images in zip(range(0, per_process, CHUNK), chunks, strict=False):
            logits = classifiers(images.to(device))
            all_logits[start : start + len(logits)] = logits.cpu()
    if accelerator is not None and processes > 1:
        wait_for_all(accelerator)  # the main process may still be measuring
        all_logits = accelerator.gather(all_logits.to(accelerator.device)).cpu()
    return all_logits[:count].movedim(1, 0)


@dataclass(frozen=True)
class TrainedSeed:
    """The stages of one seed, measured by this process or together with other processes."""

    config: TrainConfig
    data: TrainingData
    run: Path
    seed: int
    device: torch.device
    accelerator: Accelerator | None = field(default=None, repr=False)

    @property
    def stages(self) -> tuple[StageName, ...]:
        return ("base",) if self.config.head is None else ("base", "head")

    @property
    def is_main(self) -> bool:
        return self.accelerator is None or self.accelerator.is_main_process

    @cached_property
    def classifiers(self) -> StageClassifiers:
        """The classifiers of all stages. Raises InputError for a stage that is not trained."""
        return load_stages(self.run, self.seed, self.stages, self.config)

    @cached_property
    def sources(self) -> dict[StageName, str]:
        """The digest of the settings, data and weights behind each stage's predictions."""
        digest, folder = run_digest(self.config, self.data.record), seed_folder(self.run, self.seed)
        files = {"base": (MODEL,), "head": (MODEL, HEAD)}
        return {
            stage: fingerprint([digest, *(file_digest(folder / name) for name in files[stage])])
            for stage in self.stages
        }

    def logits_file(self, stage: StageName) -> Path:
        return logits_file(self.run, self.seed, stage)

    def predict(self, load: Load, count: int, *, what: str) -> dict[StageName, Tensor]:
        """Logits [N, K] of each stage for the same images.

        Args:
            what: name of the images, for the message.
        Raises:
            InputError: a logit is not finite.
        """
        stage_logits = predict_all(
            self.classifiers,
            load,
            count,
            num_classes=self.data.num_classes,
            device=self.device,
            accelerator=self.accelerator,
        )
        for stage, logits in zip(self.stages, stage_logits, strict=True):
            bad = (~logits.isfinite()).any(1).nonzero()
            if len(bad):
                classifier = f"{self.run} seed {self.seed} stage {stage}"
                text = f"gives NaN or infinite logits for {len(bad)} of {count} {what} images"
                raise InputError("run", classifier, f"{text}; train it with a lower learning rate")
        return dict(zip(self.stages, stage_logits, strict=True))

    @property
    def _needs_mixed(self) -> bool:
        """Whether a calibrator is fitted on mixed images, too."""
        names = self.config.evaluation.calibrators
        return self.data.mixed is not None and any(CALIBRATORS[name].with_mixed for name in names)

    def _logits_are_current(self) -> bool:
        """Whether the current weights produced the logits on disk."""
        metadata = [read_metadata(self.logits_file(stage)) for stage in self.stages]
        return all(
            each.get("source") == self.sources[stage] and ("mixed" in each or not self._needs_mixed)
            for stage, each in zip(self.stages, metadata, strict=True)
        )

    def logits(self, *, fresh: bool) -> dict[StageName, dict[str, Tensor]]:
        """Logits and targets of validation and test, from disk if these weights produced them.

        If a calibrator is fitted on mixed images, too, also those of as many mixed images as there
        are validation images.

        The main process decides whether to reuse files, writes missing ones, and alone reads them;
        for reused files the other processes get {}.

        Args:
            fresh: run the classifiers even if their logits are stored.
        """
        files = {stage: self.logits_file(stage) for stage in self.stages}
        if not fresh and broadcast_from_main(self._logits_are_current, self.accelerator):
            return {stage: load_tensors(path) for stage, path in files.items() if self.is_main}
        tensors: dict[StageName, dict[str, Tensor]] = {stage: {} for stage in self.stages}
        for name in ("validation", "test"):
            split = getattr(self.data.real, name)
            load = self.data.stream(split).chunks
            for stage, logits in self.predict(load, len(split), what=name).items():
                tensors[stage][f"{name}_logits"] = logits
                tensors[stage][f"{name}_targets"] = torch.from_numpy(split.targets)
        if self._needs_mixed:
            for stage, of_mixed in self._predict_mixed().items():
                tensors[stage] |= of_mixed
        if self.is_main:
            for stage, path in files.items():
                metadata = {"source": self.sources[stage]}
                metadata |= {"mixed": "validation"} if self._needs_mixed else {}
                save_tensors(path, tensors[stage], metadata=metadata)
        return tensors

    def _predict_mixed(self) -> dict[StageName, dict[str, Tensor]]:
        """Logits and labels of as many mixed images as there are validation images.

        They are drawn from all images of the dataset, the same for every seed and method.
        """
        assert self.data.mixed is not None
        images = self.data.mixed.by_image()
        count = min(len(self.data.real.validation), len(images))
        generator = torch.Generator().manual_seed(derived_seed(0, "mixed images to calibrate on"))
        drawn = torch.randperm(len(images), generator=generator)[:count].sort().values

        def load(indices: Sequence[Tensor]) -> Generator[Tensor, None, None]:
            for numbers in indices:
                yield images[drawn[numbers].tolist()]["image"]

        labels = images[drawn.tolist()]["label"]
        return {
            stage: {"mixed_logits": logits, "mixed_labels": labels}
            for stage, logits in self.predict(load, count, what="mixed").items()
        }
