"""Devices: the precision that float32 has on them."""

import pytest
import torch

from data.device import float32_precision, resolve_dtype
from data.errors import InputError


def precisions() -> list[str]:
    places = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    return [place.fp32_precision for place in places]


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_precision_of_float32_is_changed_for_a_while(precision):
    before = precisions()
    assert before[1] == "tf32", "torch's default, which is why this is needed"
    with pytest.raises(KeyError), float32_precision(precision):
        assert precisions() == [precision] * 2
        raise KeyError
    assert precisions() == before
    assert torch.backends.cudnn.allow_tf32, "who reads torch's older flags still can"


def test_a_precision_that_the_device_lacks_is_refused_by_the_settings_name():
    message = "annotation.dtype = float16: needs a GPU; use float32 or bfloat16 on a CPU"
    with pytest.raises(InputError, match=message):
        resolve_dtype("float16", "cpu", field="annotation.dtype")
