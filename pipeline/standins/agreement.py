"""Measure how often a classifier of real images recognises a small generator's classes."""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.svm import SVC

from semix.data.fingerprint import hashed_seed
from semix.data.splits import RealDataset
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.noise import initial_noise

MAX_REAL = 4000  # maximum training images of the classifier, and maximum test images
BATCH = 64


@dataclass(frozen=True)
class ClassifierAgreement:
    """Accuracies in [0, 1] of a support vector machine on pixels, trained on real images.

    Attributes:
        generated: on `images` generated images, evenly over the classes.
        real: on real test images, for comparison.
    """

    generated: float
    images: int
    real: float


def end_point_agreement(
    config: GeneratorConfig, real: RealDataset, *, images: int = 200
) -> ClassifierAgreement:
    """Accuracy of a classifier of real images on generated images of single classes."""
    rng = np.random.default_rng(0)
    train = rng.permutation(len(real.train))[:MAX_REAL]
    test = rng.permutation(len(real.test))[:MAX_REAL]
    judge = SVC().fit(_flat(real.train.images(train)), real.train.targets[train])
    targets = np.arange(images) % len(real.class_names)
    pictures = _generated(config, real, targets)
    return ClassifierAgreement(
        generated=float(judge.score(_flat(pictures), targets)),
        images=images,
        real=float(judge.score(_flat(real.test.images(test)), real.test.targets[test])),
    )


def _generated(config: GeneratorConfig, real: RealDataset, targets: np.ndarray) -> np.ndarray:
    """Images uint8 [N, S, S, 3] of the classes `targets`, at the size of the real images."""
    generator = load_generator(config, device="cpu")
    embeddings = generator.encode(real.class_names)
    batches = []
    for start in range(0, len(targets), BATCH):
        classes = targets[start : start + BATCH]
        seeds = [hashed_seed(0, "quality", start + i) for i in range(len(classes))]
        noise = initial_noise(seeds, generator.latent_shape)
        latents = generator.sample(noise, embeddings[torch.from_numpy(classes)])
        batches.append(generator.decode(latents).numpy())
    return np.concatenate(batches)


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1) / 255
