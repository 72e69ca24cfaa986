"""G9: training with mixed images as a run does it, against the official style of loader."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks.encoding import crops
from benchmarks.gpu.bench import Bench
from benchmarks.measure import Result
from semix.calib.config import TrainConfig
from semix.calib.models import build_model
from semix.calib.real_data import open_data
from semix.calib.stage_one import BaseStage
from semix.data.device import float32_precision
from semix.data.images import encode_image
from semix.data.settings import load_settings
from semix.data.tar import GroupSample
from tests import handmade

CLASSES, SIZE, ALPHAS = 10, 32, 8
PER_REAL = 2  # mixed images per real image: an end point and an inner one
TFLOP_AN_IMAGE = 3 * 2 * 1.30e9 / 1e12  # ResNet-50 at 32 px: 1.30 G multiply-adds forward
WORKERS = 8  # of the peer's DataLoader
# Real images, series per pair, batch; True: on CPU.
SIZES = {False: (5120, 20, 128), True: (40, 1, 8)}


def g9_training(bench: Bench) -> Result:
    """Images per second: semix in bf16 and float32, the peer in float32 with TF32."""
    tiny = bench.device == "cpu"
    model = "resnet8" if tiny else "resnet50"
    count, series, batch = SIZES[tiny]
    what = f"{batch} real and {PER_REAL * batch} mixed images a step, photographs of {SIZE} px"
    result = Result("G9", f"{model}: {what}")
    folder = bench.folder / "training"
    url = write_images(folder, count // CLASSES, series)
    with float32_precision("tf32"):
        rates = {"peer": peer_rate(bench, folder, model, batch)}
        for precision in ("no", "bf16"):
            config = settings(folder, url, model=model, batch=batch, precision=precision)
            rates[precision] = our_rate(bench, config)
    best = max(rates["no"], rates["bf16"])
    result.at_least("images a second over the official loader's", best / rates["peer"], 5.0)
    if not tiny:
        result.at_least("images a second", best, 10_000)
        result.figures["tflops"] = best * TFLOP_AN_IMAGE
    result.figures |= {"images_per_second": rates, "same precision": rates["no"] / rates["peer"]}
    return result


def our_rate(bench: Bench, config: TrainConfig) -> float:
    """Real and mixed images per second in whole epochs of stage one."""
    AcceleratorState._reset_state(reset_partial_state=True)  # it holds one precision at a time
    on_cpu = bench.device == "cpu"
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=on_cpu)
    stage = BaseStage(config, open_data(config), seed=0, accelerator=accelerator)
    epochs = itertools.count()
    seconds = bench.seconds(lambda: stage.train_epoch(next(epochs)))
    accelerator.free_memory()
    return stage.images_per_epoch * (1 + PER_REAL) / seconds


def settings(folder: Path, url: str, *, model: str, batch: int, precision: str) -> TrainConfig:
    real = {"name": "imagefolder", "path": str(folder / "real"), "image_size": SIZE}
    values = {
        "name": "csm",
        "real": {**real, "allow_overlap": 10_000},  # crops of one sky may be alike
        "mixed": {"url": url, "per_real": PER_REAL},
        "model": {"name": model},
        "batch_size": batch,
        "augment": {"flip": True},
        "mixed_precision": precision,
    }
    return load_settings(TrainConfig, values)


def peer_rate(bench: Bench, folder: Path, model: str, batch: int) -> float:
    """CSM's loop: a DataLoader opens single PNG files and draws groups until one has the class."""
    network = build_model(model, CLASSES).to(bench.device).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    workers = WORKERS if bench.device != "cpu" else 0
    loader = DataLoader(
        LoosePairs(folder),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=bench.device != "cpu",
        persistent_workers=workers > 0,
    )

    def epoch() -> None:
        for batch_tensors in loader:
            images, target, mixed, labels = (t.to(bench.device) for t in batch_tensors)
            loss = functional.cross_entropy(network(images)[0], target)
            p = network(mixed.flatten(0, 1))[0].softmax(1)
            loss = loss + (p - labels.flatten(0, 1)).square().sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 2.0)
            optimiser.step()
            loss.item()  # the official code reads the loss of every step

    return len(loader) * batch * (1 + PER_REAL) / bench.seconds(epoch)


class LoosePairs(Dataset[tuple[Tensor, ...]]):
    """A real image, and an end point and an inner image of a random series with its class.

    Source: reimplements the official CSM loader: every image is a PNG file that is opened when it
    is drawn, and series are drawn until one contains the class.
    """

    def __init__(self, folder: Path) -> None:
        self.files = sorted((folder / "real" / "train").glob("*/*.png"))
        self.classes = {name: k for k, name in enumerate(class_names())}
        self.series = sorted((folder / "loose").iterdir())
        self.change = v2.Compose(
            [
                v2.RandomCrop(SIZE, padding=4),
                v2.RandomHorizontalFlip(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        path = self.files[index]
        target = self.classes[path.parent.name]
        pair: list[int] = []
        while target not in pair:
            series = random.choice(self.series)
            pair = [int(field) for field in series.name.split("_")[1:]]
        end = 0 if target == pair[1] else ALPHAS - 1  # weights of the first class rise
        positions = [end, random.randrange(1, ALPHAS - 1)]
        mixed = torch.stack([self._open(series / f"{n:02d}.png") for n in positions])
        labels = torch.zeros(2, CLASSES)
        for row, n in enumerate(positions):
            labels[row, pair[0]] = n / (ALPHAS - 1)
            labels[row, pair[1]] = 1 - n / (ALPHAS - 1)
        return self._open(path), torch.tensor(target), mixed, labels

    def _open(self, path: Path) -> Tensor:
        with Image.open(path) as image:
            tensor: Tensor = self.change(image.convert("RGB"))
        return tensor


def class_names() -> tuple[str, ...]:
    return tuple(f"class{k}" for k in range(CLASSES))


def write_images(folder: Path, per_class: int, series_a_pair: int) -> str:
    """Real images in class folders, series as loose files, and the same series as a root.

    Each image is a different crop of photographs; the cost of reading depends on the content, the
    cost of training does not. Returns the root's URL.
    """
    bank = small_crops()
    untimed = {"validation": 1, "test": 1}  # a run needs them; they are not read while timed
    pieces = iter(bank)
    for split, count in {"train": per_class, **untimed}.items():
        for name in class_names():
            target = folder / "real" / split / name
            target.mkdir(parents=True)
            for n in range(count):
                Image.fromarray(next(pieces)).save(target / f"{n:05d}.png")
    alphas = [n / (ALPHAS - 1) for n in range(ALPHAS)]
    pairs = itertools.combinations(range(CLASSES), 2)
    samples = []
    for group, (pair, _) in enumerate(itertools.product(pairs, range(series_a_pair))):
        images = [bank[(group * ALPHAS + n) % len(bank)] for n in range(ALPHAS)]
        target = folder / "loose" / f"{group:06d}_{pair[0]}_{pair[1]}"
        target.mkdir(parents=True)
        for n, image in enumerate(images):
            Image.fromarray(image).save(target / f"{n:02d}.png")
        labels = [[[pair[0], a], [pair[1], 1 - a]] for a in alphas]
        fields: dict[str, Any] = {
            "classes": list(pair),
            "alphas": alphas,
            "weights": alphas,
            "labels": labels,
        }
        record = handmade.series_of(handmade.record(group, **fields))
        encoded = [encode_image(image, "webp") for image in images]
        samples.append(GroupSample(record, encoded, "webp"))
    url: str = handmade.root_of(folder / "mixed", samples, class_names()).url
    return url


def small_crops() -> np.ndarray:
    """Pieces of photographs, uint8 [N, SIZE, SIZE, 3]."""
    large = crops(64)
    steps = range(0, large.shape[1] - SIZE + 1, SIZE)
    pieces = [large[:, y : y + SIZE, x : x + SIZE] for y in steps for x in steps]
    return np.ascontiguousarray(np.concatenate(pieces))
