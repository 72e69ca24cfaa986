"""How good a small generator is: what a classifier of real images, and CLIP, see in its images."""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.svm import SVC
from torch import Tensor

from semix.data.fingerprint import hashed_seed
from semix.data.splits import ImageSplit, RealDataset, stratified_split
from semix.pipeline.clip import ClipEncoder
from semix.pipeline.config import EncoderConfig, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.noise import initial_noise

REAL = 4000  # training images of the classifier, and test images, over all classes
MAX_GENERATED, MIN_PER_CLASS = 500, 5  # generated images
BATCH = 64


@dataclass(frozen=True)
class ClassQuality:
    """The quality of one class's images, beside that of as many real test images.

    Attributes:
        generated, real: share in which a support vector machine on pixels, trained on real images,
            sees the class.
        distance, real_distance: Frechet distances (Heusel et al. 2017) between Gaussians fitted to
            CLIP features, to those of training images of the class.
    """

    generated: float
    real: float
    distance: float
    real_distance: float


def end_point_quality(
    generator: GeneratorConfig, clip: EncoderConfig, real: RealDataset
) -> dict[str, ClassQuality]:
    """The quality of generated images of single classes, by class."""
    images, targets = _some(real.train)
    judge = SVC().fit(_flat(images), targets)
    encoder = ClipEncoder(clip, device="cpu")
    features = encoder.encode(torch.from_numpy(images))
    tests, test_targets = _some(real.test)
    per_class = max(MIN_PER_CLASS, MAX_GENERATED // len(real.class_names))
    pictures = _generated(generator, real, per_class=per_class)
    quality = {}
    for target, name in enumerate(real.class_names):
        shown = tests[test_targets == target][:per_class]
        reference = features[torch.from_numpy(targets == target)]
        sides = (pictures[target], shown)
        recognised = [float((judge.predict(_flat(each)) == target).mean()) for each in sides]
        encoded = [encoder.encode(torch.from_numpy(each)) for each in sides]
        distances = [frechet_distance(each, reference) for each in encoded]
        quality[name] = ClassQuality(*recognised, *distances)
    return quality


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Frechet distance of Gaussians fitted to features [N, D] and [M, D]."""
    means, covariances = zip(
        *((each.double().mean(0), each.double().T.cov(correction=0)) for each in (first, second)),
        strict=True,
    )
    # The trace of the root of their product, whose eigenvalues are real and not negative.
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    spread = covariances[0].trace() + covariances[1].trace() - 2 * roots
    return float((means[0] - means[1]).square().sum() + spread.clamp(min=0))


def _some(split: ImageSplit) -> tuple[np.ndarray, np.ndarray]:
    """Images and targets, as many of each class, so that a rare one is there, too."""
    per_class = max(MIN_PER_CLASS, REAL // len(np.unique(split.targets)))
    rows, _, _ = stratified_split(split.targets, (per_class, 0), seed=0)
    return split.images(rows), split.targets[rows]


def _generated(config: GeneratorConfig, real: RealDataset, *, per_class: int) -> list[np.ndarray]:
    """Images uint8 [per_class, S, S, 3] of each class, at the size of the real images."""
    generator = load_generator(config, device="cpu")
    embeddings = generator.encode(real.class_names)
    pictures = []
    for target in range(len(real.class_names)):
        batches = []
        for start in range(0, per_class, BATCH):
            count = min(BATCH, per_class - start)
            seeds = [hashed_seed(0, "quality", target, start + i) for i in range(count)]
            noise = initial_noise(seeds, generator.latent_shape)
            classes = torch.full((count,), target)
            batches.append(generator.decode(generator.sample(noise, embeddings[classes])).numpy())
        pictures.append(np.concatenate(batches))
    return pictures


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1) / 255
