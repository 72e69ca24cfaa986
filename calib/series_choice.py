"""Choose the series to train on by what a run's classifiers say of their images."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from semix.calib.config import ChoiceConfig, TrainConfig
from semix.calib.network import load_trained, predict
from semix.calib.run_folder import DataRecord, read_data, require_trained, run_digest
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.store import Store

FOLDER = "predictions"  # of a root: what runs say of its images
CHUNK = 256  # series that are read at a time


def choose_series(mixed: MixedDataset, choice: ChoiceConfig, *, image_size: int) -> Tensor:
    """The series with the highest scores, int64 [n], ascending.

    Of each set of classes the same share remains, at least one series, so that classes stay
    balanced.

    Args:
        image_size: side of the images in `mixed`, pixels.
    Raises:
        InputError: the run is not trained, or has other classes or another image size.
    """
    scores = score(choice.by, mixed, class_probabilities(mixed, Path(choice.run), image_size))
    chosen: list[Tensor] = []
    _, set_of = mixed.classes.unique(dim=0, return_inverse=True)
    for number in range(int(set_of.max()) + 1):
        series = torch.nonzero(set_of == number)[:, 0]
        count = math.ceil(choice.share * len(series))
        best = scores[series].sort(descending=True, stable=True).indices[:count]
        chosen.append(series[best])
    return torch.cat(chosen).sort().values


def score(by: str, mixed: MixedDataset, probabilities: Tensor) -> Tensor:
    """Score of each series, the mean over its images, float [G].

    Args:
        by: "uncertainty", the entropy of the predicted probabilities; "boundary", 1 - the distance
            of the two largest; "disagreement", the total variation between prediction and label.
        probabilities: float32 [G, A, K].
    """
    if by == "uncertainty":
        each = torch.special.entr(probabilities).sum(-1)
    elif by == "boundary":
        first, second = probabilities.topk(2, dim=-1).values.unbind(-1)
        each = 1 - (first - second)
    else:
        each = (probabilities - mixed.labels).abs().sum(-1) / 2
    return each.mean(1)


def class_probabilities(mixed: MixedDataset, run: Path, image_size: int) -> Tensor:
    """Mean probabilities by a run's classifiers, as trained, of all mixed images, [G, A, K].

    They are computed once and kept in the root, as float16 in
    `predictions/RUN-DIGEST/SERIES-DIGEST.safetensors`. Of several processes the first to write
    decides, so that all choose the same series.
    """
    config, record = require_judge(run, mixed.class_names, image_size)
    store = Store(mixed.url)
    name = f"{FOLDER}/{run_digest(config, record)}/{mixed.series_digest}.safetensors"
    if not store.exists(name):
        networks = [load_trained(run, seed, config=config) for seed in config.seeds]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        chunks, positions = [], torch.arange(mixed.alphas.shape[1])
        for series in torch.arange(len(mixed)).split(CHUNK):
            images = mixed.read(series[:, None], positions)[0].flatten(0, 1)
            logits = torch.stack([predict(network, images, device=device) for network in networks])
            means = logits.softmax(-1).mean(0)
            chunks.append(means.view(len(series), -1, means.shape[-1]).half())
        store.create(name, save({"probabilities": torch.cat(chunks)}))
    return load(store.get(name))["probabilities"].float()


def require_judge(
    run: Path, class_names: Sequence[str], image_size: int
) -> tuple[TrainConfig, DataRecord]:
    """The settings and data of a run that can judge such images.

    Raises:
        InputError: it is not trained, or has other classes or another image size.
    """
    config, record = require_trained(run), read_data(run)
    if list(class_names) != record["class_names"]:
        remedy = "has other classes than the mixed dataset; name a run on the same classes"
        raise InputError("mixed.choose.run", run, remedy)
    if config.real.image_size != image_size:
        remedy = f"sees images of {config.real.image_size} pixels, and these have {image_size}"
        raise InputError("mixed.choose.run", run, remedy)
    return config, record
