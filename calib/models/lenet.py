"""LeNet-5, for digits and other small pictures."""

from torch import nn

from calib.models.base import ImageClassifier
from calib.parameters import in_range


class LeNet(ImageClassifier):
    """Two 5x5 convolutions and two hidden layers, with today's ReLU and max pooling.

    Without batch norms it fits a small training set far beyond what it is sure of, which makes
    it the quickest honest example of overconfidence.

    Args:
        num_classes: K.
        width: multiplies every layer; D = 84 width.
    Raises:
        InputError: width is not a whole number of at least 1.

    Source: LeCun et al. 1998, section II.B.
    """

    def __init__(self, num_classes: int, *, width: int = 1) -> None:
        super().__init__()
        what = "give a whole number of at least 1"
        in_range("model.width", width, low=1, what=what, whole=True)
        self.num_features = 84 * width
        self.features = nn.Sequential(
            nn.Conv2d(3, 6 * width, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6 * width, 16 * width, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(5),  # nothing at 32 pixels; other sizes fit as well
            nn.Flatten(),
            nn.Linear(400 * width, 120 * width),
            nn.ReLU(),
            nn.Linear(120 * width, 84 * width),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(self.num_features, num_classes)
