"""The base class of classifiers, and loading of pretrained weights."""

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from semix.data.errors import InputError
from semix.data.files import MAX_TENSORS, check_size


class ImageClassifier(nn.Module):
    """`features` maps images [N, 3, S, S] to [N, D], `classifier` maps features to logits.

    Another head on the same features may replace `classifier`.
    """

    num_features: int  # D
    image_size: int | None = None  # S, where it takes images of one size only
    features: nn.Module
    classifier: nn.Module

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images float [N, 3, S, S] to logits [N, K] and features [N, D]."""
        features = self.features(images)
        return self.classifier(features), features

    @torch.no_grad()
    def map_side(self, images: Tensor) -> int | None:
        """Side of the last feature map before pooling; None if there is none."""
        pools = [m for m in self.features.modules() if isinstance(m, nn.AdaptiveAvgPool2d)]
        sides: list[int] = []
        hook = pools[-1].register_forward_pre_hook(lambda _, maps: sides.append(maps[0].shape[-1]))
        self.features(images)
        hook.remove()
        return sides[-1]

    def freezing_order(self) -> list[nn.Module]:
        """The modules to freeze, from the output down: classifier, last block, ..., stem.

        Every parameter is in exactly one of these modules.
        """
        return [self.classifier, *reversed(modules_with_parameters(self.features.children()))]


def modules_with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that have parameters, in order."""
    return [module for module in modules if any(True for _ in module.parameters())]


log = logging.getLogger("semix.train")

Tensors = dict[str, Tensor]
BATCH_COUNTER = "num_batches_tracked"  # of a batch norm; without effect, so many files leave it out


def load_weights(network: nn.Module, path: Path, *, last: str) -> None:
    """Fill a network of timm in place; on the meta device only check whether the file fits.

    Args:
        last: name of the last layer, which keeps its fresh weights if the file has none or those
            of another number of classes.
    Raises:
        InputError: the file does not exist or is not safetensors, or a tensor is missing,
            superfluous or of another shape; the message names the first such tensor.
    """
    state = network.state_dict()
    on_meta = any(tensor.is_meta for tensor in state.values())
    weights = _adapt(_read(path, header_only=on_meta), network)
    layer = (f"{last}.weight", f"{last}.bias")
    if fresh := _has_other_classes(weights, state, layer):
        weights = {name: tensor for name, tensor in weights.items() if name not in layer}
    expected = {name for name in state if not (fresh and name in layer)}
    _check_state_fits(weights, state, expected, path)
    if on_meta:
        return
    network.load_state_dict({**state, **weights})
    if fresh:
        log.info(
            "%s: its last layer %s has other classes and starts with fresh weights", path, last
        )


def _read(path: Path, *, header_only: bool) -> Tensors:
    if not path.is_file():
        raise InputError("model.weights", path, "is not there")
    check_size(path, max_bytes=MAX_TENSORS)
    try:
        if not header_only:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        problem = f"is no safetensors file ({error}); convert it first"
        raise InputError("model.weights", path, problem) from None
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _adapt(weights: Tensors, network: nn.Module) -> Tensors:
    """Convert older names and position embeddings of other sizes, as timm does for its files."""
    adapt = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    return weights if adapt is None else dict(adapt(weights, network))


def _has_other_classes(weights: Tensors, state: Tensors, layer: tuple[str, str]) -> bool:
    weight = weights.get(layer[0])
    if weight is None:
        return True
    classes, *width = state[layer[0]].shape
    return list(weight.shape[1:]) == width and weight.shape[0] != classes


def _check_state_fits(weights: Tensors, state: Tensors, expected: set[str], path: Path) -> None:
    for name in [*(name for name in state if name in expected), *weights]:
        if name not in weights and name.endswith(BATCH_COUNTER):
            continue
        shapes = [tuple(t[name].shape) if name in t else "none" for t in (weights, state)]
        if shapes[0] != shapes[1]:
            remedy = f"the network has {shapes[1]}; is it of this architecture?"
            raise InputError(f"{path}: {name}", shapes[0], remedy)
