"""The base of settings of a loss, method or model, which a config chooses by name."""

from pkgutil import resolve_name
from typing import Any, ClassVar, get_args

from pydantic import ConfigDict, SerializerFunctionWrapHandler, model_serializer

from semix.data.errors import InputError
from semix.data.settings import Settings


class ComponentConfig(Settings):
    """A loss, method or model by name, with its parameters.

    Attributes:
        implementation: `module:object`, called as `(num_classes, settings)`. It is a text, so that
            settings are checked without torch, which takes seconds to import.
    """

    # A bool is no number here, and neither is a text.
    model_config = ConfigDict(strict=True)

    implementation: ClassVar[str]
    name: str

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that choose these settings."""
        return get_args(cls.model_fields["name"].annotation)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that were given; the other ones have their defaults."""
        return {name: getattr(self, name) for name in self.model_fields_set - {"name"}}

    def build(self, num_classes: int) -> Any:
        """The loss, method or model for this number of classes.

        Raises:
            InputError: there are fewer than two classes, or it refuses a value.
        """
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise InputError("num_classes", num_classes, "give a whole number of at least 2")
        return resolve_name(self.implementation)(num_classes, self)

    @model_serializer(mode="wrap")
    def _dump_what_was_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out defaults: a parameter that is new in semix changes no older run's identity."""
        given = self.model_fields_set | {"name"}
        return {name: value for name, value in dump(self).items() if name in given}
