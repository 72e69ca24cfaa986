"""Parts of a run that are chosen by name, with parameters of their own."""

from typing import Any

from pydantic import ConfigDict, Field

from data.settings import Settings


class PartConfig(Settings):
    """A loss or a model by name; every other key is one of its own parameters."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="see `calib.losses` and `calib.models`")

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
