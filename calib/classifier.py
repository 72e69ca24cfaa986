"""A trained run as a classifier of new pictures, with calibrated probabilities."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from semix.calib.calibration import read_calibration
from semix.calib.calibrators import PLAIN
from semix.calib.calibrators.base import Calibrator
from semix.calib.checkpoint import load_tensors
from semix.calib.config import TrainConfig
from semix.calib.cross_fitting import cross_fitted_nll
from semix.calib.metrics.conformal import SCORES, Score, nonconformity, sets_within, threshold
from semix.calib.network import Classifier, load_trained, predict
from semix.calib.run_folder import (
    StageName,
    logits_file,
    read_data,
    report_damage,
    require_trained,
)
from semix.data.device import resolve_device
from semix.data.errors import InputError, choices
from semix.data.images import fit_square, load_square
from semix.data.machine import cores
from semix.data.picture_files import MAX_THREADS
from semix.data.threads import mapped

Picture = str | PathLike[str] | Image.Image | np.ndarray
Pictures = Picture | Tensor | Sequence[Picture]


def load_classifier(
    run: str | Path,
    seed: int | None = None,
    stage: StageName | None = None,
    calibrator: str | None = None,
    *,
    among: Sequence[str] = (),
    device: str = "cpu",
) -> "CalibratedClassifier":
    """Load a classifier that was trained and measured, with its calibration.

    Args:
        run: a run's folder.
        seed: one of its seeds; None: the mean of the probabilities of all seeds, each calibrated.
        stage: "base" or "head"; None: the last one.
        calibrator: one of those that were fitted, or "plain" for the network as trained; None: the
            one with the lowest NLL on validation images, by cross-fitting.
        among: the calibrators from which None chooses; all that were fitted by default.
        device: auto, cpu, cuda or cuda:N.
    Raises:
        InputError: the run is not trained or not measured, its files are damaged, or it has no
            such seed, stage or calibrator.
    """
    folder = Path(run)
    config = require_trained(folder)
    seeds = config.seeds if seed is None else (seed,)
    stages: tuple[StageName, ...] = ("base",) if config.head is None else ("base", "head")
    stage = stages[-1] if stage is None else stage
    for field, given, known in (("seed", seeds[0], config.seeds), ("stage", stage, stages)):
        if given not in known:
            raise InputError(field, given, choices(given, map(str, known)))
    members = [_member(folder, config, each, stage) for each in seeds]
    label = f"{config.name} ({stage}), "
    label += f"mean of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    fitted = [name for name in members[0].fitted if all(name in each.fitted for each in members)]
    reason = ""
    if calibrator is None:
        considered = [name for name in fitted if not among or name in among]
        calibrator, reason = _choose(folder, seeds, stage, considered)
    elif calibrator not in (PLAIN, *fitted):
        raise InputError("calibrator", calibrator, choices(calibrator, (PLAIN, *fitted)))
    classifier = CalibratedClassifier(
        members,
        calibrator,
        config=config,
        stage=stage,
        class_names=tuple(read_data(folder)["class_names"]),
        label=f"{label}; calibrator {calibrator}{reason}",
    )
    return classifier.to(device)


def _choose(
    run: Path, seeds: Sequence[int], stage: StageName, names: Sequence[str]
) -> tuple[str, str]:
    """The calibrator with the lowest cross-fitted NLL, mean over seeds, and why it is chosen."""
    each = [cross_fitted_nll(run, seed, stage, names) for seed in seeds]
    nll = {name: math.fsum(of_seed[name] for of_seed in each) / len(each) for name in each[0]}
    best = min(nll, key=lambda name: nll[name])
    reason = f": NLL {nll[best]:.4f} on validation images, by cross-fitting"
    return best, f"{reason}, the lowest of {len(nll)} (as trained {nll[PLAIN]:.4f})"


@dataclass(frozen=True)
class Member:
    """One stage of one seed, with what was fitted on its validation images.

    Attributes:
        fitted: calibrators by name.
        logits, targets: of the validation images, [N, K] and [N].
    """

    network: Classifier
    fitted: Mapping[str, Calibrator]
    logits: Tensor
    targets: Tensor


def _member(run: Path, config: TrainConfig, seed: int, stage: StageName) -> Member:
    calibration = read_calibration(run, seed, stage)
    path = logits_file(run, seed, stage)
    if not path.is_file():
        raise InputError("run", path, f"is missing; run `semix evaluate {run}` first")
    tensors = load_tensors(path)
    with report_damage(path):
        logits, targets = tensors["validation_logits"], tensors["validation_targets"]
    network = load_trained(run, seed, stage, config=config)
    return Member(network, calibration.calibrators, logits, targets)


class CalibratedClassifier:
    """Class probabilities of pictures, by one seed of a run or by the mean of several.

    Pictures may be files, or PIL images, or uint8 arrays or tensors [H, W, 3] or [N, H, W, 3] of
    any size, one or several. They are turned upright, scaled and cropped as in training.

    Attributes:
        class_names: the K classes, in the order of all outputs.
        calibrator: its name, "plain" without one.
        image_size: side of the images that the network sees, pixels.
        label: says what it is: run, stage, seeds, calibrator and why this one.
        config, stage: of the run.
        members: its seeds.
        networks: an nn.Module, uint8 [N, S, S, 3] to logits [N, K], for each seed.
    """

    def __init__(
        self,
        members: Sequence[Member],
        calibrator: str,
        *,
        config: TrainConfig,
        stage: StageName,
        class_names: tuple[str, ...],
        label: str,
    ) -> None:
        self.class_names, self.calibrator, self.label = class_names, calibrator, label
        self.config, self.stage, self.image_size = config, stage, config.real.image_size
        self.networks = nn.ModuleList(member.network for member in members).eval()
        self.members = members
        self._device = torch.device("cpu")

    def to(self, device: str | torch.device) -> Self:
        """Move the networks. Raises InputError for a device that does not exist."""
        self._device = torch.device(resolve_device(str(device)))
        self.networks.to(self._device)
        return self

    def half(self) -> Self:
        """Compute the networks in float16; normalisation and calibration stay as they are."""
        for network in self.networks:
            assert isinstance(network, Classifier)
            network.half_network()
        return self

    def logits(self, pictures: Pictures) -> Tensor:
        """Calibrated logits or log probabilities, float32 [N, K] on the CPU.

        Their softmax is `probabilities`.
        """
        return self.logits_of_squares(self._squares(pictures))

    def probabilities(self, pictures: Pictures) -> Tensor:
        """Calibrated probabilities of the classes, float32 [N, K] on the CPU."""
        return self.logits(pictures).softmax(1)

    def predict_set(
        self, pictures: Pictures, coverage: float = 0.9, *, score: Score = "thr"
    ) -> Tensor:
        """Conformal sets of classes, bool [N, K], which hold the true one at this rate or more.

        The rate holds on average over pictures like the validation images.

        Raises:
            InputError: a coverage outside (0, 1), or for which there are too few validation images.
        """
        return self.sets_of(self.probabilities(pictures), coverage, score=score)

    def logits_of_squares(self, images: Tensor) -> Tensor:
        """As `logits`, of images that are scaled and cropped already, uint8 [N, S, S, 3]."""
        each = [
            self._calibrated(member, predict(network, images, device=self._device))
            for member, network in zip(self.members, self.networks, strict=True)
        ]
        if len(each) == 1:
            return each[0].float()
        mean = torch.stack([logits.double().log_softmax(1) for logits in each]).logsumexp(0)
        return (mean - math.log(len(each))).float()

    def sets_of(self, probabilities: Tensor, coverage: float, *, score: Score = "thr") -> Tensor:
        """As `predict_set`, of `probabilities`."""
        if score not in SCORES:
            raise InputError("score", score, choices(score, SCORES))
        limit = self.limit_of(coverage, score=score)
        return sets_within(nonconformity(probabilities.double(), score), limit)

    def limit_of(self, coverage: float, *, score: Score = "thr") -> float:
        """The threshold of the sets, from the same probabilities of validation images.

        Raises:
            InputError: as `predict_set`.
        """
        if not 0 < coverage < 1:
            raise InputError("coverage", coverage, "give a fraction between 0 and 1")
        probabilities, targets = self._on_validation
        limit = threshold(nonconformity(probabilities, score), targets, 1 - coverage)
        if math.isinf(limit):
            remedy = f"{len(targets)} validation images are too few for it; lower it"
            raise InputError("coverage", coverage, remedy)
        return limit

    @cached_property
    def _on_validation(self) -> tuple[Tensor, Tensor]:
        """Calibrated probabilities, float64 [N, K], and targets of the validation images."""
        each = [self._calibrated(m, m.logits).double().softmax(1) for m in self.members]
        return torch.stack(each).mean(0), self.members[0].targets

    def _calibrated(self, member: Member, logits: Tensor) -> Tensor:
        return logits if self.calibrator == PLAIN else member.fitted[self.calibrator](logits)

    def _squares(self, pictures: Pictures) -> Tensor:
        """Images as the network sees them, uint8 [N, S, S, 3]."""
        if isinstance(pictures, Tensor):
            pictures = pictures.cpu().numpy()
        if isinstance(pictures, str | PathLike | Image.Image):
            pictures = [pictures]
        if isinstance(pictures, np.ndarray) and pictures.ndim == 3:
            pictures = pictures[None]
        squares = mapped(self._square, pictures, threads=min(MAX_THREADS, cores()))
        empty = np.empty((0, self.image_size, self.image_size, 3), np.uint8)
        return torch.from_numpy(np.stack(list(squares)) if len(pictures) else empty)

    def _square(self, picture: Picture) -> np.ndarray:
        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
                shape = f"{picture.dtype} {list(picture.shape)}"
                raise InputError("pictures", shape, "give uint8 [N, H, W, 3], red, green and blue")
            if picture.shape[:2] == (self.image_size, self.image_size):
                return picture
            picture = Image.fromarray(picture)
        if isinstance(picture, Image.Image):
            return fit_square(picture, self.image_size)
        try:
            return load_square(Path(picture), self.image_size)
        except OSError as error:
            raise InputError("pictures", picture, str(error.strerror or error)) from None
