"""Kinds of calibration by name: as trained, and the post-hoc calibrators; without torch."""

from typing import Literal

# With the labels that follow a method's name in tables; `semix.calib.calibrators` fits them.
PLAIN: Literal["plain"] = "plain"
CalibratorName = Literal[
    "scaled", "ets", "vector", "svs", "sms", "isotonic", "smart", "scaled_mixed"
]
CALIBRATOR_LABELS: dict[str, str] = {
    "scaled": "+ temperature scaling",
    "ets": "+ ETS",
    "vector": "+ vector scaling",
    "svs": "+ SVS",
    "sms": "+ SMS",
    "isotonic": "+ isotonic regression",
    "smart": "+ SMART",
    "scaled_mixed": "+ temperature scaling with mixed images",
}
STANDARD: tuple[CalibratorName, ...] = ("ets", "vector", "svs", "sms", "isotonic")


def split_kind(key: str) -> tuple[str, str]:
    """The kind and the measure in a key such as `scaled_ece`; "plain" for `ece`."""
    prefixes = sorted((f"{kind}_" for kind in CALIBRATOR_LABELS), key=len, reverse=True)
    for prefix in prefixes:
        if key.startswith(prefix):
            return prefix[:-1], key.removeprefix(prefix)
    return PLAIN, key
