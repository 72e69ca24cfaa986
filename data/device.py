"""Which device `auto` means."""

import torch

from data.errors import InputError


def resolve_device(name: str) -> str:
    """auto is cuda where there is one, else cpu. Raises InputError for a device that is not."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        remedy = "torch sees no GPU here, and semix doctor says more; use cpu"
        raise InputError("device", name, remedy)
    return name
