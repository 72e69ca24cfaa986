"""Are a small generator's pictures of a class read as that class by one who saw real ones alone?"""

from dataclasses import dataclass

import numpy as np
import torch
from semix.data.fingerprint import hashed_seed
from semix.data.splits import RealDataset
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.noise import initial_noise
from sklearn.svm import SVC

MOST_REAL = 4000  # images that the classifier learns from, and as many to compare with
AT_ONCE = 64


@dataclass(frozen=True)
class ClassifierAgreement:
    """Shares in [0, 1] that a support vector machine on the pixels gets right.

    Attributes:
        generated: of `images` generated ones, evenly over the classes.
        real: of real test images, to compare with.
    """

    generated: float
    images: int
    real: float


def end_point_agreement(
    config: GeneratorConfig, real: RealDataset, *, images: int = 200
) -> ClassifierAgreement:
    """Generate pictures of single classes, and have them read by an independent classifier."""
    draw = np.random.default_rng(0)
    train = draw.permutation(len(real.train))[:MOST_REAL]
    test = draw.permutation(len(real.test))[:MOST_REAL]
    judge = SVC().fit(_flat(real.train.images(train)), real.train.targets[train])
    wanted = np.arange(images) % len(real.class_names)
    pictures = _generated(config, real, wanted)
    return ClassifierAgreement(
        generated=float(judge.score(_flat(pictures), wanted)),
        images=images,
        real=float(judge.score(_flat(real.test.images(test)), real.test.targets[test])),
    )


def _generated(config: GeneratorConfig, real: RealDataset, wanted: np.ndarray) -> np.ndarray:
    """uint8 [N, S, S, 3] of the wanted classes, at the size of the real ones."""
    generator = load_generator(config, device="cpu")
    embeddings = generator.encode(real.class_names)
    found = []
    for start in range(0, len(wanted), AT_ONCE):
        classes = wanted[start : start + AT_ONCE]
        seeds = [hashed_seed(0, "quality", start + i) for i in range(len(classes))]
        noise = initial_noise(seeds, generator.latent_shape)
        latents = generator.sample(noise, embeddings[torch.from_numpy(classes)])
        found.append(generator.decode(latents).numpy())
    return np.concatenate(found)


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1) / 255
