"""BalCAL: a linear head and a simplex frame, balanced so that confidence equals accuracy."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from semix.calib.batches import TrainingBatch
from semix.calib.config.method import BalCALConfig
from semix.calib.losses import MixedLoss
from semix.calib.losses.base import Feedback, RealLoss
from semix.calib.methods.base import BatchOutcome, Forward, Method
from semix.calib.models.base import ImageClassifier
from semix.data.errors import InputError


class BalancedClassifier(nn.Module):
    """Features [N, D] to balance z_linear + (1 - balance) z_frame, [N, K].

    In training mode the output is both logits side by side, [N, 2K], because each has its own
    loss. The frame takes features through an adaptor, at unit length.

    Args:
        linear: the linear head, [N, D] to [N, K].
        in_features: D, at least K.
        balance: initial weight of the linear head.
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


TOLERANCE = 1e-4  # of the bisection


class BalCAL(Method):
    """balance L(linear head) + (1 - balance) L(frame), and the same mixture as the classifier.

    After each epoch the balance is set so that the mean confidence on the training images is
    delta times their accuracy.

    The official code takes confidence and accuracy from the augmented batches of the epoch; here
    they come from one pass over the unaugmented images. Its adaptor is convolutional and works on
    the last feature maps; here it works on the pooled features, which every model has.

    Source: Ni et al. 2025 (Balancing Two Classifiers via a Simplex ETF Structure), and its code.
    """

    # Losses of logits and targets only, without state, as the loss is called twice per step.
    losses = (
        "ce", "ls", "mbls", "acls", "focal", "flsd53", "dual_focal", "mmce", "mmce_weighted",
        "mdca", "ecp", "brier", "cpc",
    )  # fmt: skip

    def __init__(self, num_classes: int, settings: BalCALConfig) -> None:
        super().__init__()
        self.num_classes, self.delta = num_classes, settings.delta
        self.start, self.etf_scale = settings.start, settings.etf_scale

    @property
    def balance(self) -> Tensor:
        """The balance, a buffer of the classifier."""
        return self._adapted[0].balance

    def adapt(self, backbone: ImageClassifier) -> None:
        """Replace the classifier. Raises InputError for fewer features than classes."""
        width = backbone.num_features
        if width < self.num_classes:
            remedy = f"needs {self.num_classes} features or more, the model has {width}; widen it"
            raise InputError("method.name", "balcal", remedy)
        classifier = BalancedClassifier(
            backbone.classifier,
            width,
            self.num_classes,
            balance=self.start,
            scale=self.etf_scale,
        )
        backbone.classifier = classifier
        self._adapted = (classifier,)  # a tuple, so that torch does not register it as submodule

    def forward(self, network: Forward, batch: TrainingBatch, loss: RealLoss) -> BatchOutcome:
        outputs, features = network(batch.images)
        linear, frame = outputs.chunk(2, dim=1)
        scaled = frame * frequency_scale(batch.targets, self.num_classes)
        losses = [
            loss(logits, batch.targets, features=features, indices=batch.indices)
            for logits in (linear, scaled)
        ]
        return BatchOutcome(self._mix(*losses), self._mix(linear, frame), batch.targets)

    def on_mixed(
        self, network: Forward, images: Tensor, labels: Tensor, loss: MixedLoss
    ) -> tuple[Tensor, Tensor]:
        linear, frame = network(images)[0].chunk(2, dim=1)
        value = self._mix(loss(linear, labels), loss(frame, labels))
        return value, self._mix(linear, frame)

    @torch.no_grad()
    def end_epoch(self, backbone: ImageClassifier, feedback: Feedback) -> None:
        classifier = backbone.classifier
        assert isinstance(classifier, BalancedClassifier)
        outputs = feedback.outputs("train")
        training = classifier.training
        features = outputs.features.to(classifier.balance.device).float()
        linear, frame = classifier.eval().both(features)
        classifier.train(training)
        targets = outputs.targets.to(linear.device)
        classifier.balance.fill_(find_balance(linear, frame, targets, delta=self.delta))

    def _mix(self, linear: Tensor, frame: Tensor) -> Tensor:
        return self.balance * linear + (1 - self.balance) * frame


def frequency_scale(targets: Tensor, num_classes: int) -> Tensor:
    """sqrt(mean count / count) of each class of the batch, [K]; 1 for classes not in it."""
    # Not bincount, which waits for the device to learn the number of classes.
    counts = targets.new_zeros(num_classes).scatter_add_(0, targets, torch.ones_like(targets))
    present = counts > 0
    mean = len(targets) / present.sum()
    return torch.where(present, (mean / counts.clamp(min=1)).sqrt(), 1.0)


def find_balance(linear: Tensor, frame: Tensor, targets: Tensor, *, delta: float) -> float:
    """The weight of the linear head at which confidence is delta times accuracy, by bisection.

    As in the official code, the result is the last weight tried at which confidence comes nearer
    to that target than the linear head's; 1 if none does, or if the linear head's is below it.

    Args:
        linear, frame: logits [N, K] of the two.
        targets: int64 [N].
    """
    excess = _overconfidence(linear, targets, delta)
    balance, low, high = 1.0, 0.0, 1.0
    if excess < 0:
        return balance
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        difference = _overconfidence(middle * linear + (1 - middle) * frame, targets, delta)
        if abs(difference) < excess:
            balance = middle
        low, high = (middle, high) if difference < 0 else (low, middle)
    return balance


def _overconfidence(logits: Tensor, targets: Tensor, delta: float) -> float:
    """Mean confidence minus delta times accuracy."""
    confidence, predicted = logits.float().softmax(1).max(1)
    return (confidence.mean() - delta * (predicted == targets).float().mean()).item()
