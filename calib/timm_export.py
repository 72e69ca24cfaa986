"""A classifier in timm's format, which timm and transformers load; its softmax is calibrated."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from semix.calib.calibrators import PLAIN
from semix.calib.calibrators.base import Calibrator
from semix.calib.calibrators.scaling import TemperatureScaling, VectorScaling
from semix.calib.checkpoint import save_tensors
from semix.calib.classifier import CalibratedClassifier
from semix.calib.config import TrainConfig
from semix.calib.config.model import IMAGENET_STEM, ResNetConfig, TimmConfig
from semix.calib.models.convnets import ResNet
from semix.calib.models.timm_models import TimmClassifier
from semix.data.errors import InputError
from semix.data.files import write_json
from semix.data.real import load_real

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FOLDED = (PLAIN, "scaled", "vector")  # calibrators that a last layer can hold
OTHERS = "--format onnx or pt2 holds it"
LAST_OF_RESNET = "fc"
RENAMED = (  # modules of semix's ResNets, and what timm calls them
    (r"^features\.stem\.0\.", "conv1."),
    (r"^features\.stem\.1\.", "bn1."),
    (r"^features\.stage(\d)\.(\d+)\.", r"layer\1.\2."),
    (r"\.norm(\d)\.", r".bn\1."),
    (r"\.shortcut\.", r".downsample."),
    (r"^classifier\.", f"{LAST_OF_RESNET}."),
)


def export_timm(classifier: CalibratedClassifier, folder: Path, *, license_name: str = "") -> None:
    """Write `config.json` and `model.safetensors`.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` and transformers'
    `pipeline("image-classification", model=FOLDER)` load it. Temperature or vector scaling is
    folded into the last layer.

    Args:
        license_name: of the weights, as an identifier of SPDX; "" names none.
    Raises:
        InputError: several seeds, a head, a calibrator or an architecture that timm cannot hold;
            the message names the format that can.
    """
    architecture, arguments = check_timm(classifier)
    (member,) = classifier.members
    backbone = member.network.network.backbone
    state, last = _state(backbone)
    _fold(state, last, member.fitted.get(classifier.calibrator))
    import timm  # takes seconds

    network: Any = timm.create_model(
        architecture, pretrained=False, num_classes=len(classifier.class_names), **arguments
    )
    expected = network.state_dict()
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in expected.items()}:
        remedy = f"its weights are not those of timm's {architecture}; {OTHERS}"
        raise InputError("model.name", classifier.config.model.name, remedy)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, state, metadata={"format": "pt"})
    write_json(folder / CONFIG, _config(classifier, architecture, arguments, network, license_name))


def check_timm(classifier: CalibratedClassifier) -> tuple[str, dict[str, Any]]:
    """The architecture and its arguments in timm. Raises InputError as `export_timm`."""
    model = classifier.config.model
    if len(classifier.members) > 1:
        seeds = f"mean of {len(classifier.members)}"
        raise InputError("--seed", seeds, f"one network has one seed; name it, or {OTHERS}")
    if classifier.stage == "head":
        remedy = f"timm has no such head; export --stage base, or {OTHERS}"
        raise InputError("--stage", "head", remedy)
    if classifier.config.method.name == "balcal":
        raise InputError("method.name", "balcal", f"timm has no such classifier; {OTHERS}")
    if classifier.calibrator not in FOLDED:
        remedy = f"a last layer holds {' or '.join(FOLDED)}; {OTHERS}"
        raise InputError("--calibrator", classifier.calibrator, remedy)
    if isinstance(model, TimmConfig):
        if model.feature != "post_norm":
            raise InputError("model.feature", model.feature, f"timm normalises before; {OTHERS}")
        backbone = classifier.members[0].network.network.backbone
        fixed = {} if backbone.image_size is None else {"img_size": backbone.image_size}
        return model.architecture, fixed
    if isinstance(model, ResNetConfig) and model.stem == IMAGENET_STEM and model.width == 64:
        return model.name, {}
    remedy = f"timm builds no network alike; {OTHERS}"
    raise InputError("model.name", model.name, remedy)


def _state(backbone: nn.Module) -> tuple[dict[str, Tensor], str]:
    """The state by timm's names, and the name of the last layer."""
    if isinstance(backbone, TimmClassifier):
        last = backbone.last_layer
        state = {f"{last}.{n}": t for n, t in backbone.classifier.state_dict().items()}
        return {**backbone.features.state_dict(), **state}, last
    assert isinstance(backbone, ResNet)
    renamed: dict[str, Tensor] = {}
    for name, tensor in backbone.state_dict().items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed, LAST_OF_RESNET


def _fold(state: dict[str, Tensor], last: str, calibrator: Calibrator | None) -> None:
    """Fold a calibrator into the last layer: W / T and b / T, or diag(w) W and w b + c."""
    weight, bias = state[f"{last}.weight"].double(), state[f"{last}.bias"].double()
    if isinstance(calibrator, TemperatureScaling):
        weight, bias = weight / calibrator.temperature, bias / calibrator.temperature
    elif isinstance(calibrator, VectorScaling):
        scale, shift = calibrator.weight, calibrator.bias
        weight, bias = scale[:, None] * weight, scale * bias + shift
    state[f"{last}.weight"], state[f"{last}.bias"] = weight.float(), bias.float()


def _config(
    classifier: CalibratedClassifier,
    architecture: str,
    arguments: Mapping[str, Any],
    network: Any,
    license_name: str,
) -> dict[str, Any]:
    """Settings as timm's `save_for_hf` names them.

    It itself writes `model_args` always, and with them transformers does not load the model.
    """
    normalise = classifier.members[0].network.network.normalise
    side, own = classifier.image_size, network.pretrained_cfg
    pool = getattr(network.global_pool, "pool_type", network.global_pool)
    config = {
        "architecture": architecture,
        "num_classes": len(classifier.class_names),
        "num_features": network.num_features,
        "global_pool": pool,
        "label_names": list(classifier.class_names),
        "pretrained_cfg": {
            "num_classes": len(classifier.class_names),
            "input_size": [3, side, side],
            "fixed_input_size": bool(arguments),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": (normalise.mean.double() / 255).tolist(),
            "std": (normalise.std.double() / 255).tolist(),
            "first_conv": own.get("first_conv"),
            "classifier": own.get("classifier"),
            **({"license": license_name} if license_name else {}),
        },
    }
    return config | ({"model_args": dict(arguments)} if arguments else {})


def reading_difference(classifier: CalibratedClassifier, folder: Path, *, images: int) -> str:
    """A sentence on how probabilities differ where timm reads the run's test pictures.

    Args:
        images: at most so many pictures are compared.
    """
    import timm  # takes seconds
    from timm.data import create_transform, resolve_model_data_config

    paths = test_files(classifier.config)[:images]
    if not paths:
        return "Its real images are no files, so reading by timm was not compared."
    network: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform: Any = create_transform(**resolve_model_data_config(network), is_training=False)
    with torch.no_grad():
        theirs = torch.cat(
            [network(transform(Image.open(p).convert("RGB"))[None]).softmax(1) for p in paths]
        )
    difference = (theirs - classifier.probabilities(paths)).abs().amax(1)
    mean, largest = difference.mean().item(), difference.max().item()
    text = "Its transform scales before it crops, where semix crops first: over "
    text += (
        f"{len(paths)} test pictures the probability of a class changes by {largest:.2g} at most, "
    )
    return f"{text}{mean:.2g} on average."


def test_files(config: TrainConfig) -> list[Path]:
    """The files of the run's test images; none for bundled images, or if they are not there."""
    try:
        test = load_real(config.real).test
    except InputError:
        return []
    return [Path(test.name(row)) for row in range(len(test))] if config.real.path else []
