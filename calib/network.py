"""The trained network: normalisation and classifier, weight averages, outputs for splits."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from semix.calib.batches import Normalise
from semix.calib.checkpoint import load_exactly
from semix.calib.config import PartConfig, TrainConfig
from semix.calib.heads import build_head
from semix.calib.losses.base import Outputs
from semix.calib.methods import Method, build_method
from semix.calib.models import build_model
from semix.calib.real_data import TrainingData, TrainingSplit
from semix.calib.run_folder import (
    CONFIG,
    DATA,
    HEAD,
    MODEL,
    StageName,
    read_data,
    seed_folder,
    stored_settings,
)
from semix.data.device import float32_precision
from semix.data.errors import InputError

CHUNK = 500  # images in one forward pass


class Network(nn.Module):
    """A model with its normalisation, which stage one trains and `model.safetensors` holds.

    Args:
        method: trains the network and adapts it first; None if the network is only loaded.
    """

    def __init__(
        self, config: TrainConfig, num_classes: int, *, method: Method | None = None
    ) -> None:
        super().__init__()
        self.normalise = Normalise()
        self.backbone = build_model(config.model.name, num_classes, **config.model.params)
        if method is None:
            method = build_method(config.method.name, num_classes, **config.method.params)
        method.adapt(self.backbone)
        if config.mixed is not None:
            adopt_policy(self.backbone, config.mixed.batch_norm)
        self.num_features = self.backbone.num_features

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images in 0..255, uint8 or float [N, S, S, 3], to logits [N, K], features [N, D]."""
        logits, features = self.backbone(self.normalise(images))
        return logits, features

    def features(self, images: Tensor) -> Tensor:
        """uint8 [N, S, S, 3] to [N, D]."""
        features: Tensor = self.backbone.features(self.normalise(images))
        return features


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


def load_classifier(run: Path, seed: int, stage: StageName = "base") -> Classifier:
    """A classifier that a run has trained, on the CPU and in eval mode.

    Args:
        stage: "base" for the network as stage one left it, "head" with stage two's head on it.
    Raises:
        InputError: the run has not trained it, or its files do not fit its settings.
    """
    config = stored_settings(_existing(run / CONFIG).parent)
    num_classes = len(read_data(_existing(run / DATA).parent)["class_names"])
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
    """Drop pretrained weights: the trained ones replace them, and the file may be gone by now."""
    values = config.model.model_dump()
    values.pop("weights", None)
    return config.model_copy(update={"model": PartConfig.model_validate(values)})


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InputError("run", path, "is not there; train this run and seed first")
    return path


Policy = Literal["shared", "eval_on_mixed", "separate"]


class SeparateNorm(_BatchNorm):
    """A batch norm with a second one, `mixed`, which replaces it in passes of mixed images.

    Source: Xie et al. 2020, "Adversarial Examples Improve Image Recognition", section 3.2: an
    auxiliary batch norm, affine parameters and statistics, for images of another kind.
    """

    mixed: nn.Module
    on_mixed = False

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.mixed(x) if self.on_mixed else super().forward(x)
        return normalised


def adopt_policy(network: nn.Module, policy: Policy) -> None:
    """Prepare a fresh network for a policy; existing names in its state do not change.

    "separate" adds to every batch norm a copy of it, named `.mixed`. Inference never uses the
    copies.

    Raises:
        InputError: another policy than "shared" for a network without batch norms.
    """
    norms = _norms(network)
    if policy != "shared" and not norms:
        remedy = "the model has no batch norms; leave it at shared"
        raise InputError("mixed.batch_norm", policy, remedy)
    if policy == "separate":
        kinds = {kind: _separate_kind(kind) for kind in map(type, norms)}
        for norm in norms:
            norm.mixed = copy.deepcopy(norm)
            # Changed in place, as its parent module refers to this object.
            norm.__class__ = kinds[type(norm)]


@contextmanager
def mixed_pass(network: nn.Module, policy: Policy) -> Iterator[None]:
    """Within this context, batch norms treat images as mixed ones.

    "shared": like real images. "eval_on_mixed": with the running statistics, which do not change.
    "separate": with the second batch norms that `adopt_policy` has added.
    """
    norms = _norms(network)
    training = [norm.training for norm in norms]
    try:
        for norm in norms:
            if policy == "eval_on_mixed":
                norm.training = False
            elif policy == "separate" and isinstance(norm, SeparateNorm):
                norm.on_mixed = True
        yield
    finally:
        for norm, was_training in zip(norms, training, strict=True):
            norm.training = was_training
            if isinstance(norm, SeparateNorm):
                norm.on_mixed = False


def _norms(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def _separate_kind(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Separate{kind.__name__}", (SeparateNorm, kind), {})


RUNNING_STATISTICS = ("running_mean", "running_var")  # averaged like the weights


class WeightAverage:
    """A copy of a network whose weights are average <- decay average + (1 - decay) weights.

    The average begins with the weights of the first step. Statistics of batch norms are averaged
    likewise; every other buffer is copied from the network at the end of each epoch.

    Args:
        decay: in (0, 1).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.model = AveragedModel(network)
        self.model.requires_grad_(False)
        self._average = get_ema_multi_avg_fn(decay)

    @property
    def network(self) -> nn.Module:
        return self.model.module

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Called after every step of the optimiser."""
        # Instead of update_parameters, which sends the number of steps to the device and waits.
        averages, values = _floating(self.network), _floating(network)
        if self.model.n_averaged == 0:  # on the CPU, wherever the network is
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)
        else:
            self._average(averages, values, self.model.n_averaged)
        self.model.n_averaged += 1

    @torch.no_grad()
    def copy_buffers(self, network: nn.Module) -> None:
        """Copy all buffers but running statistics, such as counters, at the end of an epoch."""
        buffers = dict(self.network.named_buffers())
        for name, buffer in network.named_buffers():
            if name.rpartition(".")[2] not in RUNNING_STATISTICS:
                buffers[name].copy_(buffer)


def _floating(module: nn.Module) -> list[Tensor]:
    tensors = chain(module.parameters(), module.buffers())
    return [tensor for tensor in tensors if tensor.is_floating_point()]


class SplitOutputs:
    """The Feedback of one network: eval mode, float32, images without augmentation.

    Each process runs an equal part and gathers the others, so that all have the same outputs.
    They are cached until `forget`.

    Args:
        network: uint8 [N, S, S, 3] to logits and features; its mode does not change.
    """

    def __init__(self, network: nn.Module, data: TrainingData, accelerator: Accelerator) -> None:
        self.network, self.data, self.accelerator = network, data, accelerator
        self._outputs: dict[TrainingSplit, Outputs] = {}

    def outputs(self, split: TrainingSplit) -> Outputs:
        """Outputs for all images of the split, on the device. Every process must call."""
        if split not in self._outputs:
            self._outputs[split] = self._run(split)
        return self._outputs[split]

    def forget(self) -> None:
        """Discard cached outputs, as the network has changed."""
        self._outputs.clear()

    def _run(self, split: TrainingSplit) -> Outputs:
        training = self.network.training
        self.network.eval()
        device = self.accelerator.device
        images = self.data.images(split, self.accelerator)
        with closing(images.parts(self._local_indices(len(images)).split(CHUNK))) as parts:
            rows = self.accelerator.gather(in_parts(self._rows, parts, device=device))
        self.network.train(training)
        targets = torch.from_numpy(getattr(self.data.real, split).targets).to(device)
        logits, features = rows[: len(targets)].tensor_split([self.data.num_classes], dim=1)
        return Outputs(logits, features, targets)

    def _rows(self, images: Tensor) -> Tensor:
        logits, features = self.network(images)
        return torch.cat([logits.float(), features.float()], dim=1)  # [N, K + D]

    def _local_indices(self, count: int) -> Tensor:
        """Indices of this process's part of the images; the last parts repeat first images."""
        share = math.ceil(count / self.accelerator.num_processes)
        first = self.accelerator.process_index * share
        return torch.arange(first, first + share) % count


def predict(classifier: nn.Module, images: Tensor, *, device: torch.device) -> Tensor:
    """Logits of uint8 [N, S, S, 3], float32 [N, K] on the CPU, in the module's present mode."""
    return in_chunks(classifier.to(device), images, device=device).cpu()


def in_chunks(
    function: Callable[[Tensor], Tensor], rows: Tensor, *, device: torch.device | None = None
) -> Tensor:
    """Apply a function without gradients to many rows, one part at a time."""
    return in_parts(function, rows.split(CHUNK), device=device)


@torch.no_grad()
@float32_precision("ieee")
def in_parts(
    function: Callable[[Tensor], Tensor],
    parts: Iterable[Tensor],
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Apply a function without gradients to parts of rows, as they come."""
    return torch.cat([function(part.to(device or part.device)) for part in parts])
