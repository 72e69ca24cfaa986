"""Training methods by name: how a batch of real images becomes a loss.

Any method can take mixed images of a dataset in a second pass. Other combinations:

| method | losses | FeDLaS | second stage |
|---|---|---|---|
| plain | any | yes | yes |
| mixup, cutmix, mit | ce | no: FeDLaS needs images of one class | yes |
| regmixup, rankmixup | any, on the unmixed images | yes, on those | yes |
| plp | any | yes | no: it changes how the classifier is trained |
| balcal | losses of logits only | no: the loss is called twice per step | no: it is such a stage |
"""

from typing import Any

from semix.calib.config.method import MethodConfig
from semix.calib.methods.base import BatchOutcome, Forward, Method
from semix.data.settings import Settings, load_settings

__all__ = ["BatchOutcome", "Forward", "Method", "build_method"]


class _Section(Settings):
    method: MethodConfig


def build_method(name: str, num_classes: int, **params: Any) -> Method:
    """A training method, called as `(network, batch, loss)`.

    Raises:
        InputError: an unknown name or parameter, or a value out of range.
    """
    settings = load_settings(_Section, {"method": {"name": name, **params}}).method
    method: Method = settings.build(num_classes)
    return method
