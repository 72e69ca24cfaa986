"""A linear head beside a fixed simplex equiangular tight frame, and their balance."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class BalancedClassifier(nn.Module):
    """Features [N, D] to balance z_linear + (1 - balance) z_frame, [N, K].

    In training mode it gives both logits side by side, [N, 2K], because each has a loss of its
    own. The frame sees features through an adaptor, at unit length.

    Args:
        linear: the linear head, [N, D] to [N, K].
        in_features: D, at least K.
        balance: share of the linear head at first.
        scale: length of the frame's vectors.
    """

    frame: Tensor  # [D, K]
    balance: Tensor

    def __init__(
        self,
        linear: nn.Module,
        in_features: int,
        num_classes: int,
        *,
        balance: float,
        scale: float,
    ) -> None:
        super().__init__()
        self.linear, self.adaptor = linear, Adaptor(in_features)
        self.register_buffer("frame", scale * simplex_frame(in_features, num_classes))
        self.register_buffer("balance", torch.tensor(float(balance)))

    def forward(self, features: Tensor) -> Tensor:
        linear, frame = self.both(features)
        if self.training:
            return torch.cat([linear, frame], dim=1)
        return self.balance * linear + (1 - self.balance) * frame

    def both(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the linear head and of the frame, each [N, K]."""
        adapted = functional.normalize(self.adaptor(features).float(), dim=1)
        return self.linear(features), adapted @ self.frame


class Adaptor(nn.Module):
    """A pre-activated residual bottleneck, [N, D] to [N, D], then batch norm and ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(1, width // 2)
        self.residual = nn.Sequential(
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, inner, bias=False),
            nn.BatchNorm1d(inner),
            nn.ReLU(),
            nn.Linear(inner, width, bias=False),
        )
        self.norm = nn.BatchNorm1d(width)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(features + self.residual(features)).relu()


def simplex_frame(width: int, num_classes: int) -> Tensor:
    """sqrt(K / (K - 1)) P (I - 1/K), [D, K]: unit vectors at equal angles, in a random rotation."""
    rotation, _ = torch.linalg.qr(torch.rand(width, num_classes))  # [D, K]
    centred = torch.eye(num_classes) - 1 / num_classes
    return math.sqrt(num_classes / (num_classes - 1)) * (rotation @ centred)
