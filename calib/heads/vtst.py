"""VTST's head: TST's with a Gaussian latent, whose predictions are averaged over draws."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from calib.heads.tst import encoder
from calib.parameters import in_range


class VTSTHead(nn.Module):
    """Features [N, D] to logits [N, K] through z ~ N(mean, variance), both of the features.

    Two networks D -> 3Z -> Z give the mean and, through log sigmoid, the log variance, so the
    variance is below 1. In training mode z is drawn once a sample from torch's global generator.
    In eval mode the result is the log of the class probabilities' mean over `samples` draws; the
    noise behind them is a buffer, one set for all samples: what is predicted for a sample depends
    on nothing else.

    Args:
        in_features: D.
        num_classes: K.
        latent: Z.
        samples: draws behind a prediction.
    Raises:
        InputError: a latent width or a number of draws below 1.

    Source: Jordahn and Olmos 2024 (arXiv 2405.01196), variational two-stage training.
    """

    noise: Tensor  # [S, 1, Z] float32, standard normal

    def __init__(
        self, in_features: int, num_classes: int, *, latent: int = 10, samples: int = 10
    ) -> None:
        super().__init__()
        what = "give a whole number of at least 1"
        in_range("head.samples", samples, low=1, what=what, whole=True)
        self.mean = encoder(in_features, latent)
        self.log_variance = encoder(in_features, latent)
        self.classifier = nn.Linear(latent, num_classes)
        self.register_buffer("noise", torch.randn(samples, 1, latent))

    def encode(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, [N, Z] each."""
        return self.mean(features), functional.logsigmoid(self.log_variance(features))

    def forward(self, features: Tensor) -> Tensor:
        mean, log_variance = self.encode(features)
        if self.training:
            return self.decode(mean, log_variance, torch.randn_like(mean))
        logits = self.decode(mean, log_variance, self.noise)  # [S, N, K]
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(self.noise))

    def decode(self, mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
        """Logits at mean + deviation * noise, [..., N, K]."""
        logits: Tensor = self.classifier(mean + (log_variance / 2).exp() * noise)
        return logits


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) || N(0, I)) / Z, averaged over the batch: a scalar from 0 up."""
    terms = mean.square() + log_variance.exp() - log_variance - 1  # [N, Z]
    return terms.mean() / 2
