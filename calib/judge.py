"""Judge images by the ensemble of a run's classifiers, which were trained on real images alone."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from semix.calib.network import load_trained, predict
from semix.calib.run_folder import EVALUATION, read_data, stored_settings
from semix.data.device import resolve_device
from semix.data.errors import InputError
from semix.data.files import read_json
from semix.data.images import scaled


class Judge:
    """Predicts the class to which a run's classifiers give the highest mean probability.

    Attributes:
        name: names the judge in a sentence.

    Args:
        run: folder of a finished run.
        device: auto, cpu, cuda or cuda:N.
    Raises:
        InputError: the run is not finished or was trained on mixed images, or there is no such
            device.
    """

    def __init__(self, run: Path, *, device: str = "auto") -> None:
        if not (run / EVALUATION).is_file():
            raise InputError("judge", run, "holds no evaluation.json; name a finished run")
        self.run, self.device = run, torch.device(resolve_device(device))
        self.config = stored_settings(run)
        if self.config.mixed is not None:
            remedy = "was trained on mixed images; name a run trained on real images alone"
            raise InputError("judge", run, remedy)
        rows = read_json(run / EVALUATION)["rows"]
        seeds = sorted({row["seed"] for row in rows if row["seed"] is not None})  # no ensemble
        self.classifiers = [load_trained(run, seed, config=self.config) for seed in seeds]
        classifiers = "a classifier" if len(seeds) == 1 else f"the mean of {len(seeds)} classifiers"
        self.name = f"{classifiers} trained on real images alone"

    def require_same_classes(self, class_names: tuple[str, ...]) -> None:
        """Raise InputError if the run has other classes than the dataset to judge."""
        run_classes = tuple(read_data(self.run)["class_names"])
        if run_classes != tuple(class_names):
            remedy = f"has classes {', '.join(run_classes[:5])}, ..., which are not the dataset's"
            raise InputError("judge", self.run, remedy)

    def classes(self, images: Tensor) -> Tensor:
        """Predict classes, int64 [N], of images, uint8 [N, H, W, 3], which are scaled first."""
        side = self.config.real.image_size
        if images.shape[1:3] != (side, side):
            images = torch.from_numpy(np.stack([scaled(image, side) for image in images.numpy()]))
        logits = [predict(network, images, device=self.device) for network in self.classifiers]
        return torch.stack(logits).softmax(-1).mean(0).argmax(-1)
