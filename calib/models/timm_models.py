"""Any network of timm, cut into features and its last linear layer."""

import difflib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semix.calib.config.model import TimmConfig
from semix.calib.models.base import ImageClassifier, load_weights, modules_with_parameters
from semix.data.errors import InputError


class TimmClassifier(ImageClassifier):
    """`timm.create_model(architecture, num_classes=K)`; nothing is downloaded.

    `last_layer` is the name of its last layer in timm.

    Of `weights` the last layer is ignored if its number of classes differs; position embeddings for
    another image size are resampled by timm. On the meta device only the file's header is read and
    checked. `feature: pre_norm` moves the last layer norm of a vision transformer from the feature
    extractor into the classifier, so the logits stay the same but the features are those before
    the norm.

    Raises:
        InputError: an unknown architecture, one that does not end in one linear layer, weights
            that do not fit, or a value that the architecture does not take.
    """

    def __init__(self, num_classes: int, settings: TimmConfig) -> None:
        super().__init__()
        architecture, image_size = settings.architecture, settings.image_size
        with torch.device("meta"):  # shapes only; draws no random numbers
            meta = _create(architecture, num_classes, image_size)
            name = _name_of_last_layer(meta, architecture, image_size)
        if image_size is not None or meta.pretrained_cfg.get("fixed_input_size"):
            self.image_size = image_size or meta.pretrained_cfg["input_size"][-1]
        network = _create(architecture, num_classes, image_size)
        if settings.weights is not None:
            load_weights(network, Path(settings.weights), last=name)
        last = network.get_submodule(name)
        assert isinstance(last, nn.Linear)
        self.num_features, self.last_layer = last.in_features, name
        network.set_submodule(name, nn.Identity())
        self.features: nn.Module = network
        self.classifier: nn.Module = last
        if settings.feature == "pre_norm":
            norm = _remove_norm(network, architecture)
            self.classifier = nn.Sequential(OrderedDict(norm=norm, linear=last))

    @torch.no_grad()
    def map_side(self, images: Tensor) -> int | None:
        """Side of the last feature map in pixels; None if the features are tokens."""
        network: Any = self.features
        shape = network.forward_features(images).shape
        if len(shape) != 4:
            return None
        return int(shape[1 if getattr(network, "output_fmt", "NCHW") == "NHWC" else -1])

    def freezing_order(self) -> list[nn.Module]:
        """The order in which training (method `plp`) freezes modules.

        The classifier is first, then blocks from the last to the first, then the network's own
        parameters, such as a class token, which belong to no block.
        """
        own_parameters = nn.ParameterList(self.features.parameters(recurse=False))
        blocks = [block for child in self.features.children() for block in _blocks(child)]
        return [self.classifier, *reversed(modules_with_parameters([own_parameters, *blocks]))]


def _create(architecture: str, num_classes: int, image_size: int | None) -> Any:
    import timm  # takes seconds

    if not timm.is_model(architecture):
        matches = difflib.get_close_matches(architecture, timm.list_models(), n=5)
        remedy = f"did you mean {', '.join(matches)}?" if matches else "see timm.list_models()"
        raise InputError("model.architecture", architecture, remedy)
    size: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
    try:
        return timm.create_model(architecture, pretrained=False, num_classes=num_classes, **size)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        remedy = f"{architecture} accepts any image size; remove this setting"
        raise InputError("model.image_size", image_size, remedy) from None


def _name_of_last_layer(network: Any, architecture: str, image_size: int | None) -> str:
    """The name of the last layer.

    Replaces the last layer of `network` by Identity, so pass a throw-away copy. Raises InputError
    unless that layer is linear, features [N, D] to logits [N, K].
    """
    last = network.get_classifier()
    names = [name for name, module in network.named_modules() if module is last]
    if isinstance(last, nn.Linear) and len(names) == 1:
        network.set_submodule(names[0], nn.Identity())
        if _features(network, architecture, image_size).shape == (2, last.in_features):
            return names[0]
    remedy = "does not end in one linear layer on features [N, D]; choose another"
    raise InputError("model.architecture", architecture, remedy)


def _features(network: Any, architecture: str, image_size: int | None) -> Tensor:
    """Features of two images. Raises InputError if the network does not take `image_size`."""
    size = image_size or network.pretrained_cfg["input_size"][-1]
    try:
        features: Tensor = network.eval()(torch.empty(2, 3, size, size))
    except (AssertionError, RuntimeError) as error:
        if image_size is None:
            raise
        remedy = f"{architecture} does not take it: {error}"
        raise InputError("model.image_size", image_size, remedy) from None
    return features


def _remove_norm(network: Any, architecture: str) -> nn.Module:
    """Remove the norm right before the last layer from the network, and return it."""
    name = "fc_norm" if isinstance(getattr(network, "fc_norm", None), nn.LayerNorm) else "norm"
    norm = getattr(network, name, None)
    # A per-token norm can be applied after the class token is selected, with the same result; after
    # average pooling it cannot.
    if isinstance(norm, nn.LayerNorm) and (name == "fc_norm" or network.global_pool == "token"):
        network.set_submodule(name, nn.Identity())
        return norm
    remedy = f"{architecture} has no layer norm right before its last layer; use post_norm"
    raise InputError("model.feature", "pre_norm", remedy)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The module in a list, or the modules of a sequence, recursively."""
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)
    return [leaf for child in module.children() for leaf in _blocks(child)] if is_list else [module]
