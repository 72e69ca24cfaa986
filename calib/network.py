"""The network: normalisation and classifier, batch norms, weight averages, outputs of splits."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from semix.calib.checkpoint import load_exactly
from semix.calib.config import TrainConfig
from semix.calib.config.model import TimmConfig
from semix.calib.heads import build_head
from semix.calib.losses.base import Outputs
from semix.calib.methods import Method
from semix.calib.models.base import ImageClassifier
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
from semix.calib.training_data import TrainingData, TrainingSplit
from semix.data.device import float32_precision
from semix.data.errors import InputError

CHUNK = 500  # images or rows in one forward pass


class Normalise(nn.Module):
    """Normalises images, uint8 or float in 0..255, to the network's input: float32 [N, 3, H, W].

    Mean and deviation per channel come from the training split and are saved with the model, so
    that every set of images is normalised alike.
    """

    mean: Tensor  # [3], in [0, 255]
    std: Tensor  # [3]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("std", torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        width = images.shape[2]
        rows = images.flatten(2).float()  # [N, H, 3W]: long rows are several times faster
        rows = (rows - self.mean.repeat(width)) / self.std.repeat(width)
        # Channels stay last in memory, where convolutions are faster, on the CPU and on GPUs.
        return rows.view(images.shape).permute(0, 3, 1, 2)

    @torch.no_grad()
    def fit(self, histogram: Tensor) -> "Normalise":
        """Compute mean and deviation from the histogram of pixel values, int64 [3, 256]."""
        values = torch.arange(256, dtype=torch.float64)
        for channel, counts in enumerate(histogram.double()):
            mean = (counts * values).sum() / counts.sum()
            variance = (counts * (values - mean).square()).sum() / counts.sum()
            self.mean[channel] = mean
            self.std[channel] = variance.sqrt().clamp(min=1)  # it is 0 for a single colour
        return self


class Network(nn.Module):
    """A model with normalisation of its input: what stage one trains, and `model.safetensors` has.

    Args:
        method: the training method, which adapts the model; None builds it from the settings.
    """

    def __init__(
        self, config: TrainConfig, num_classes: int, *, method: Method | None = None
    ) -> None:
        super().__init__()
        self.normalise = Normalise()
        self.backbone: ImageClassifier = config.model.build(num_classes)
        if method is None:
            method = config.method.build(num_classes)
        method.adapt(self.backbone)
        if config.mixed is not None:
            apply_batch_norm_policy(self.backbone, config.mixed.batch_norm)
        self.num_features = self.backbone.num_features

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, K] and features [N, D] of images in 0..255, uint8 or float [N, S, S, 3]."""
        logits, features = self.backbone(self.normalise(images))
        return logits, features

    def features(self, images: Tensor) -> Tensor:
        """Features [N, D] of images, uint8 [N, S, S, 3]."""
        features: Tensor = self.backbone.features(self.normalise(images))
        return features


class Classifier(nn.Module):
    """Maps images, uint8 [N, S, S, 3], to logits, float32 [N, K]."""

    def __init__(self, network: Network, head: nn.Module | None = None) -> None:
        super().__init__()
        self.network, self.head = network, head

    def half_network(self) -> None:
        """Compute in float16, but for the normalisation, whose mean it would round."""
        for module in filter(None, (self.network.backbone, self.head)):
            module.half()

    def forward(self, images: Tensor) -> Tensor:
        precision = next(self.network.backbone.parameters()).dtype
        normalised = self.network.normalise(images).to(precision)
        logits: Tensor
        if self.head is None:
            logits, _ = self.network.backbone(normalised)
        else:
            logits = self.head(self.network.backbone.features(normalised))
        return logits.float()


class StageClassifiers(nn.Module):
    """Maps images, uint8 [N, S, S, 3], to the logits of C stages, float32 [N, C, K].

    All stages share the network of stage one, which sees the images once.

    Args:
        heads: stage two's head, or none.
    """

    def __init__(self, network: Network, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.network, self.heads = network, nn.ModuleList(heads)

    def forward(self, images: Tensor) -> Tensor:
        logits, features = self.network(images)
        return torch.stack([logits.float(), *(head(features).float() for head in self.heads)], 1)


def load_trained(
    run: Path, seed: int, stage: StageName = "base", *, config: TrainConfig | None = None
) -> Classifier:
    """Load a classifier that a run has trained, on the CPU and in eval mode.

    Args:
        stage: "base" for the network of stage one, "head" for that network with stage two's head.
        config: the run's settings; None reads them.
    Raises:
        InputError: the run has not trained it, or its files do not fit its settings.
    """
    return Classifier(*_load(run, seed, config, with_head=stage == "head")).eval()


def load_stages(
    run: Path, seed: int, stages: Sequence[StageName], config: TrainConfig
) -> StageClassifiers:
    """Load the classifiers of a run's stages, base before head; otherwise as above."""
    network, head = _load(run, seed, config, with_head="head" in stages)
    return StageClassifiers(network, [head] if head else []).eval()


def _load(
    run: Path, seed: int, config: TrainConfig | None, *, with_head: bool
) -> tuple[Network, nn.Module | None]:
    config = config or stored_settings(_require_file(run / CONFIG).parent)
    num_classes = len(read_data(_require_file(run / DATA).parent)["class_names"])
    network = Network(_drop_pretrained_weights(config), num_classes)
    load_exactly(network, _require_file(seed_folder(run, seed) / MODEL))
    if not with_head:
        return network, None
    path = _require_file(seed_folder(run, seed) / HEAD)
    assert config.head is not None
    head = build_head(config.head, network.num_features, num_classes)
    load_exactly(head, path)
    return network, head


def _drop_pretrained_weights(config: TrainConfig) -> TrainConfig:
    """Remove the file of pretrained weights, which may be missing and is not needed any more."""
    if not isinstance(config.model, TimmConfig):
        return config
    model = config.model.model_copy(update={"weights": None})
    return config.model_copy(update={"model": model})


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise InputError("run", path, "is missing; train this run and seed first")
    return path


BatchNormPolicy = Literal["shared", "eval_on_mixed", "separate"]


class SeparateNorm(_BatchNorm):
    """A batch norm with another one, `mixed`, which takes its place in passes of mixed images.

    Source: Xie et al. 2020, "Adversarial Examples Improve Image Recognition", section 3.2: an
    auxiliary batch norm with its own affine parameters and statistics for images of another kind.
    """

    mixed: nn.Module
    on_mixed = False

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.mixed(x) if self.on_mixed else super().forward(x)
        return normalised


def apply_batch_norm_policy(network: nn.Module, policy: BatchNormPolicy) -> None:
    """Prepare an untrained network for a policy; the names in its state do not change.

    "separate" adds to every batch norm a copy, named `.mixed`, which inference never uses.

    Raises:
        InputError: the policy is not "shared", and the network has no batch norms.
    """
    norms = _batch_norms(network)
    if policy != "shared" and not norms:
        remedy = "the model has no batch norms; leave it at shared"
        raise InputError("mixed.batch_norm", policy, remedy)
    if policy == "separate":
        separate_classes = {
            norm_class: _separate_class(norm_class) for norm_class in map(type, norms)
        }
        for norm in norms:
            norm.mixed = copy.deepcopy(norm)
            # Changed in place, because the parent module refers to this object.
            norm.__class__ = separate_classes[type(norm)]


@contextmanager
def mixed_pass(network: nn.Module, policy: BatchNormPolicy) -> Iterator[None]:
    """A context in which the network's input is mixed images, for its batch norms.

    "shared": they are treated as real images. "eval_on_mixed": batch norms use running statistics
    and do not update them. "separate": they are replaced by those that `apply_batch_norm_policy`
    has added.
    """
    norms = _batch_norms(network)
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


def _batch_norms(network: nn.Module) -> list[_BatchNorm]:
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def _separate_class(norm_class: type[_BatchNorm]) -> type[_BatchNorm]:
    return type(f"Separate{norm_class.__name__}", (SeparateNorm, norm_class), {})


RUNNING_STATISTICS = ("running_mean", "running_var")  # of batch norms; averaged as weights are


class WeightAverage:
    """A network with averaged weights: average <- decay * average + (1 - decay) * weights.

    The average starts from the weights after the first step. Statistics of batch norms are averaged
    in the same way; all other buffers are copied from the network at the end of each epoch.

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
        # AveragedModel.update_parameters would send the number of steps to the device and wait.
        averages, values = _floating_point_tensors(self.network), _floating_point_tensors(network)
        if self.model.n_averaged == 0:  # n_averaged stays on the CPU, so no wait
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)
        else:
            self._average(averages, values, self.model.n_averaged)
        self.model.n_averaged += 1

    @torch.no_grad()
    def copy_buffers(self, network: nn.Module) -> None:
        """Copy all buffers except running statistics, at the end of an epoch."""
        buffers = dict(self.network.named_buffers())
        for name, buffer in network.named_buffers():
            if name.rpartition(".")[2] not in RUNNING_STATISTICS:
                buffers[name].copy_(buffer)


def _floating_point_tensors(module: nn.Module) -> list[Tensor]:
    tensors = chain(module.parameters(), module.buffers())
    return [tensor for tensor in tensors if tensor.is_floating_point()]


class SplitOutputs:
    """The outputs of a network for whole splits, as `Feedback`: in eval mode, float32, unaugmented.

    Each process computes an equal part and gathers the others, so that all have the same outputs.
    They are cached until `clear_cache`.

    Args:
        network: maps uint8 [N, S, S, 3] to logits and features; its training mode is restored.
    """

    def __init__(self, network: nn.Module, data: TrainingData, accelerator: Accelerator) -> None:
        self.network, self.data, self.accelerator = network, data, accelerator
        self._outputs: dict[TrainingSplit, Outputs] = {}

    def outputs(self, split: TrainingSplit) -> Outputs:
        """Outputs for all images of the split, on the device. Every process must call this."""
        if split not in self._outputs:
            self._outputs[split] = self._run(split)
        return self._outputs[split]

    def clear_cache(self) -> None:
        """Discard the cached outputs; called when the network has changed."""
        self._outputs.clear()

    def _run(self, split: TrainingSplit) -> Outputs:
        training = self.network.training
        self.network.eval()
        device = self.accelerator.device
        images = self.data.images(split, self.accelerator)
        with closing(images.chunks(self._local_indices(len(images)).split(CHUNK))) as chunks:
            rows = self.accelerator.gather(
                apply_to_chunks(self._logits_and_features, chunks, device=device)
            )
        self.network.train(training)
        targets = torch.from_numpy(getattr(self.data.real, split).targets).to(device)
        logits, features = rows[: len(targets)].tensor_split([self.data.num_classes], dim=1)
        return Outputs(logits, features, targets)

    def _logits_and_features(self, images: Tensor) -> Tensor:
        logits, features = self.network(images)
        return torch.cat([logits.float(), features.float()], dim=1)  # [N, K + D]

    def _local_indices(self, count: int) -> Tensor:
        """Indices of this process's images; the last process repeats images to get equally many."""
        local_size = math.ceil(count / self.accelerator.num_processes)
        start = self.accelerator.process_index * local_size
        return torch.arange(start, start + local_size) % count


def predict(classifier: nn.Module, images: Tensor, *, device: torch.device) -> Tensor:
    """Logits, float32 [N, K] on the CPU, of images, uint8 [N, S, S, 3], in the current mode."""
    return apply_in_chunks(classifier.to(device), images, device=device).cpu()


def apply_in_chunks(
    function: Callable[[Tensor], Tensor], rows: Tensor, *, device: torch.device | None = None
) -> Tensor:
    """Apply a function to many rows without gradients, CHUNK rows at a time."""
    return apply_to_chunks(function, rows.split(CHUNK), device=device)


@torch.no_grad()
@float32_precision("ieee")
def apply_to_chunks(
    function: Callable[[Tensor], Tensor],
    chunks: Iterable[Tensor],
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Apply a function to each chunk of rows without gradients, and concatenate the results."""
    return torch.cat([function(chunk.to(device or chunk.device)) for chunk in chunks])
