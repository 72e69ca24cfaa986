"""Which schedulers can be used, told from their config alone."""

from collections.abc import Mapping
from typing import Any

from data.errors import InputError

# Kinds that map one noise to one image, with eta 0 or no churn, as their defaults are.
DETERMINISTIC = {
    "ddim": "DDIMScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "pndm": "PNDMScheduler",
}
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def refuse_stochastic(kind: str, config: Mapping[str, Any]) -> None:
    """Raises InputError for a model whose own scheduler may draw noise.

    Args:
        kind: class name of the scheduler.
        config: what its scheduler_config.json holds.
    """
    noisy = str(config.get("algorithm_type", "")).startswith("sde")
    if kind not in DETERMINISTIC.values() or noisy:
        choices = ", ".join(DETERMINISTIC)
        remedy = f"the model's own {kind} may draw noise at each step; choose one of {choices}"
        raise InputError("generator.scheduler", "nothing", remedy)


def refuse_foreign(kind: str, config: Mapping[str, Any], *, field: str, value: str) -> None:
    """Raises InputError, for `field`, where no DDIM-like sampler can follow the model's schedule.

    Flow matching and EDM have no betas.
    """
    predicts = config.get("prediction_type", "epsilon")
    if "beta_schedule" not in config or predicts not in PREDICTIONS:
        remedy = f"cannot follow the model's {kind} (no variance-preserving noise schedule)"
        raise InputError(field, value, remedy)
