"""Parts of a run that are chosen by name, with parameters of their own.

What there is stands here a second time, so that a misspelling is found before torch is imported,
which takes seconds; a test holds the two alike.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field

from calib.parameters import choose, refuse_unknown
from data.settings import Settings

Parameters = Mapping[str, Sequence[str]]  # of each part, by its name

LOSSES: Parameters = {
    "ce": (),
    "ls": ("smoothing",),
    "mbls": ("margin", "weight"),
    "acls": ("margin", "positive", "negative", "weight"),
    "focal": ("gamma",),
    "flsd53": (),
    "dual_focal": ("gamma",),
    "ada_focal": ("bins", "gamma", "rate", "switch", "gamma_min", "gamma_max"),
    "mmce": ("weight", "bandwidth", "variant"),
    "mmce_weighted": ("weight", "bandwidth", "variant"),
    "mdca": ("weight", "base", "gamma"),
    "ecp": ("weight", "variant"),
    "brier": (),
    "cpc": ("binary_weight", "exclusion_weight", "variant"),
    "crl": ("weight", "confidence", "num_samples", "variant"),
    "fedlas_ls": ("smoothing", "beta", "momentum", "norm_start", "variant"),
    "fedlas_mbls": ("weight", "margin", "beta", "momentum", "norm_start", "variant"),
}
MIXED_LOSSES: Parameters = {"l2": (), "soft_ce": ()}
METHODS: Parameters = {
    "plain": (),
    "mixup": ("alpha", "heavier"),
    "cutmix": ("alpha",),
    "regmixup": ("alpha", "weight", "variant"),
    "rankmixup": ("kind", "weight", "alpha", "margin", "mixes", "variant"),
    "mit": ("alpha", "margin"),
    "plp": ("gamma",),
    "balcal": ("delta", "start", "etf_scale"),
}
_DEPTHS = (8, 14, 20, 32, 44, 56, 110, 18, 34, 50, 101, 152)
_STAGES_OF_FOUR = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_BOTTLENECK = "resnet110_bottleneck"
MODELS: Parameters = {
    "lenet": ("width",),
    **{f"resnet{depth}": ("width",) for depth in _DEPTHS},
    _BOTTLENECK: ("width",),
    **{f"{name}_tiny": ("width",) for name in (*_STAGES_OF_FOUR, _BOTTLENECK)},
    "wrn26_10": (),
    "wrn28_10": (),
    "wrn40_2": (),
    "densenet121": (),
    "timm": ("architecture", "weights", "feature", "image_size"),
}


def told(parts: Parameters) -> dict[str, Any]:
    """What a schema says of a field that names one of them."""
    return {"parts": {name: list(params) for name, params in parts.items()}}


class PartConfig(Settings):
    """A loss or a model by name; every other key is one of its own parameters."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="of the part")

    def check(self, known: Parameters, field: str) -> None:
        """Raises InputError for a name or a parameter that is not known."""
        refuse_unknown(self.params, choose(known, self.name, field=f"{field}.name"), field=field)

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
