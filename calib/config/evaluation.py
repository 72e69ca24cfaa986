"""What is measured of a trained classifier besides its test images."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from data.settings import Settings
from data.splits import RealDataConfig


class ShiftConfig(Settings):
    """Test images under common corruptions, made on the fly."""

    corruptions: Literal["standard", "all"] | tuple[str, ...] = Field(
        "standard", description="the 15 of the benchmark, all 19, or some by name"
    )
    severities: tuple[int, ...] = Field(
        (1, 2, 3, 4, 5), min_length=1, description="from 1, hardly seen, to 5"
    )
    bins: int = Field(15, ge=1, description="of the calibration errors under shift")
    images: int | None = Field(
        None, ge=1, description="of the test images, the first of a fixed shuffle; none: all"
    )


def _switched(shift: Any) -> Any:
    """What true and false mean, beside the settings themselves."""
    return {True: {}, False: None}[shift] if isinstance(shift, bool) else shift


class EvaluationConfig(Settings):
    """Measures of the test images, of shifted ones and of foreign ones."""

    bins: int = Field(15, ge=1, description="of every binned measure")
    bootstrap: int = Field(
        1000, ge=0, description="resamples of the test images for 95 % intervals; 0 makes none"
    )
    shift: Annotated[ShiftConfig | None, BeforeValidator(_switched)] = Field(
        None, description="none measures no corrupted images; true: with these defaults"
    )
    ood: dict[str, RealDataConfig] = Field(
        {}, description="datasets by name whose test images show none of the classes"
    )
