"""A trained classifier: images to logits, through the network alone or a head on top of it."""

from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from calib.batch_norms import adopt_policy
from calib.batches import Normalise
from calib.checkpoint import load_exactly
from calib.config import PartConfig, TrainConfig
from calib.heads import build_head
from calib.methods import build_method
from calib.models import build_model
from calib.run_folder import CONFIG, DATA, HEAD, MODEL, seed_folder
from data.errors import InputError
from data.files import read_json
from data.settings import load_settings

Stage = Literal["base", "head"]


class Network(nn.Module):
    """A model with its normalisation: what stage one trains and `model.safetensors` holds."""

    def __init__(self, config: TrainConfig, num_classes: int) -> None:
        super().__init__()
        self.normalise = Normalise()
        self.backbone = build_model(config.model.name, num_classes, **config.model.params)
        build_method(config.method.name, num_classes, **config.method.params).adapt(self.backbone)
        if config.mixed is not None:
            adopt_policy(self.backbone, config.mixed.batch_norm)
        self.num_features = self.backbone.num_features

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images in 0..255, uint8 or float [N, S, S, 3], to logits [N, K], features [N, D]."""
        logits, features = self.backbone(self.normalise(images))
        return logits, features

    def features(self, images: Tensor) -> Tensor:
        """uint8 [N, S, S, 3] to [N, D]."""
        found: Tensor = self.backbone.features(self.normalise(images))
        return found


class Classifier(nn.Module):
    """uint8 [N, S, S, 3] to logits, float32 [N, K]."""

    def __init__(self, network: Network, head: nn.Module | None = None) -> None:
        super().__init__()
        self.network, self.head = network, head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor
        if self.head is None:
            logits, _ = self.network(images)
        else:
            logits = self.head(self.network.features(images))
        return logits.float()


def load_classifier(run: Path, seed: int, stage: Stage = "base") -> Classifier:
    """A classifier that a run has trained, on the CPU and in eval mode.

    Args:
        stage: "base" for the network as stage one left it, "head" with stage two's head on it.
    Raises:
        InputError: the run has not trained it, or its files do not fit its settings.
    """
    config = load_settings(TrainConfig, read_json(_existing(run / CONFIG)))
    num_classes = len(read_json(_existing(run / DATA))["class_names"])
    network = Network(_without_weights(config), num_classes)
    load_exactly(network, _existing(seed_folder(run, seed) / MODEL))
    head = None
    if stage == "head":
        path = _existing(seed_folder(run, seed) / HEAD)
        assert config.head is not None
        head = build_head(config.head, network.num_features, num_classes)
        load_exactly(head, path)
    return Classifier(network, head).eval()


def _without_weights(config: TrainConfig) -> TrainConfig:
    """What was trained replaces pretrained weights, whose file may be gone by now."""
    values = config.model.model_dump()
    values.pop("weights", None)
    return config.model_copy(update={"model": PartConfig.model_validate(values)})


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InputError("run", path, "is not there; train this run and seed first")
    return path
