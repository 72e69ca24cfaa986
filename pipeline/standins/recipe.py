"""How the stand-ins are trained: every setting, and how the defaults follow from the data."""

from dataclasses import dataclass
from math import sqrt

TEMPLATES = (
    "a photo of a {class}",  # the template that generation uses by default
    "a picture of a {class}",
    "an image of the {class}",
)


@dataclass(frozen=True)
class Stage:
    """The length and speed of one training."""

    steps: int
    batch_size: int
    learning_rate: float  # the peak; warm-up before it, cosine decay to 0 after


@dataclass(frozen=True)
class Recipe:
    """Settings of the four small models. Widths are channels; a transformer head is 16 wide."""

    autoencoder: Stage
    denoiser: Stage
    clip: Stage
    autoencoder_widths: tuple[int, ...] = (16, 16, 32)  # all levels but the last halve the image
    latent_channels: int = 4
    kl_weight: float = 1e-6  # of the posterior's divergence from N(0, 1), per latent value
    denoiser_widths: tuple[int, ...] = (32, 32)
    text_width: int = 64
    text_layers: int = 2
    dropped_captions: float = 0.1  # share of captions replaced by "", for classifier-free guidance
    clip_width: int = 64
    clip_layers: int = 3
    clip_grid: int = 4  # patches along each side of the image
    clip_features: int = 64
    average_decay: float = 0.99  # of the moving average of the weights, which is what is kept
    templates: tuple[str, ...] = TEMPLATES  # of the captions; the bare name is one more
    max_images: int = 4096  # evenly over the classes; more would not fit into so short a training
    seed: int = 0


def recipe_for(*, num_images: int, image_size: int) -> Recipe:
    """The default recipe: about a minute on two cores for 300 images of 32 x 32.

    Args:
        num_images: images in the training split.
        image_size: side in pixels.
    """
    growth = min(3.0, max(1.0, sqrt(num_images / 300)))  # more images, more to learn
    large = image_size >= 64  # one level more, so that the latents stay 8 to 16 wide
    return Recipe(
        autoencoder=Stage(round(300 * growth), 12, 4e-3),
        denoiser=Stage(round(500 * growth), 32, 2e-3),
        clip=Stage(round(300 * growth), 48, 2e-3),
        autoencoder_widths=(16, 16, 32, 32) if large else (16, 16, 32),
        clip_grid=8 if large else 4,
    )
