"""TST's head: a small network to a latent space, then a linear layer."""

from torch import Tensor, nn

from calib.parameters import in_range

HIDDEN = 3  # times the latent width, as in the official code


class TSTHead(nn.Module):
    """Features [N, D] to logits [N, K]: D -> 3Z, ReLU, 3Z -> Z, then linear Z -> K.

    Args:
        in_features: D.
        num_classes: K.
        latent: Z.
    Raises:
        InputError: a latent width below 1.

    Source: Jordahn and Olmos 2024 (arXiv 2405.01196), two-stage training, and its code.
    """

    def __init__(self, in_features: int, num_classes: int, *, latent: int = 10) -> None:
        super().__init__()
        self.encoder = encoder(in_features, latent)
        self.classifier = nn.Linear(latent, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(features))
        return logits


def encoder(in_features: int, latent: int) -> nn.Sequential:
    """Features [N, D] to [N, Z] through one hidden layer."""
    what = "give a whole number of at least 1"
    in_range("head.latent", latent, low=1, what=what, whole=True)
    hidden = HIDDEN * latent
    return nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Linear(hidden, latent))
