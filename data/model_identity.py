"""The identity of the models that made a dataset: name, commit and hashes of files.

`plan.json` holds them under `models`. They stay dictionaries; pydantic checks their types
when they are read, and keys that a later version adds are kept.
"""

from typing import (
    Annotated,
    NotRequired,  # pydantic wants these before Python 3.12
)

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

CHECKED = ConfigDict(strict=True, extra="allow")
Name = Annotated[str, Field(max_length=4096)]  # of a model, which may be a path
Hashes = dict[Name, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]  # SHA-256 by file


@with_config(CHECKED)
class ModelCardFacts(TypedDict, total=False):
    """What the model card of a model states; it decides no byte and is in no digest."""

    license: Name
    license_name: Name
    base_model: list[Name]


@with_config(CHECKED)
class ModelIdentity(TypedDict):
    """A model of diffusers: its path or hub id, its commit, and SHA-256 of its local files."""

    model: Name
    revision: Name | None
    files: Hashes
    card: NotRequired[ModelCardFacts]


@with_config(CHECKED)
class GeneratorIdentity(ModelIdentity, total=False):
    """The generator, with models that are added to it, replace one of its networks, or change
    its noise."""

    unet: ModelIdentity
    lora: list[ModelIdentity]
    tiny_decoder: ModelIdentity
    noise: ModelIdentity


@with_config(CHECKED)
class EncoderIdentity(TypedDict):
    """A CLIP model and its precision; `revision` is the commit of a hub id."""

    model: Name
    pretrained: Name | None
    dtype: Name
    files: Hashes
    revision: NotRequired[Name]
    card: NotRequired[ModelCardFacts]


@with_config(CHECKED)
class AnnotationIdentity(EncoderIdentity):
    """The CLIP model of an annotation, and the second CLIP model, if any."""

    second: NotRequired[EncoderIdentity]


@with_config(CHECKED)
class ModelIdentities(TypedDict):
    """The value of `models` in plan.json."""

    generator: GeneratorIdentity
    annotation: AnnotationIdentity
