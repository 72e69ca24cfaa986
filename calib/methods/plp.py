"""PLP: freeze the network from the top down while it trains."""

from calib.methods.base import Plain
from calib.models.base import ImageClassifier
from calib.parameters import in_range


class PLP(Plain):
    """Progressively layer-peeled training: top parts stop early, the stem trains to the end.

    Parts are those of the backbone's `freezing_order`, mostly blocks; the official lists cut some
    blocks in half besides (11 parts of a ResNet-18, not 10). A frozen part loses its gradient
    between backward and step, so that neither momentum nor weight decay moves it. As in the
    official code, its batch norms stay in training mode: their statistics follow the parts below,
    which still change, and are those its frozen weights are seen with at test time.

    Args:
        gamma: i of L parts are frozen from epoch E (i / L)^gamma on; below 1 freezes later.
    Raises:
        InputError: gamma is out of range.

    Source: Wang and Zhang 2024 (Calibration Bottleneck), and its official code.
    """

    def __init__(self, num_classes: int, *, gamma: float = 1.0) -> None:
        super().__init__(num_classes)
        in_range("method.gamma", gamma, low=1e-6, high=1e6, what="must be above 0")
        self.gamma = gamma
        self.frozen = 0  # parts, from the top

    def start_epoch(self, backbone: ImageClassifier, epoch: int, epochs: int) -> None:
        parts = len(backbone.freezing_order())
        starts = [freezing_epoch(i, parts, epochs, self.gamma) for i in range(1, parts)]
        self.frozen = sum(epoch >= start for start in starts)

    def after_backward(self, backbone: ImageClassifier) -> None:
        for part in backbone.freezing_order()[: self.frozen]:
            for parameter in part.parameters():
                parameter.grad = None


def freezing_epoch(i: int, parts: int, epochs: int, gamma: float) -> int:
    """The first epoch in which i of the parts are frozen; never the very first epoch."""
    exact = epochs * (i / parts) ** gamma
    return max(1, int(exact + 1e-9))  # 7/10 of 350 epochs are 245, not 244.99...
