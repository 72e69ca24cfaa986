"""Deterministic samplers of a model's noise schedule, and DDIM with its inverse."""

import inspect
from typing import Any

import diffusers
from diffusers import DDIMInverseScheduler, DDIMScheduler

from data.errors import InputError
from pipeline.checks.scheduler_rules import DETERMINISTIC, refuse_foreign, refuse_stochastic

# 2M is the second order of DPM-Solver++; a learned variance plays no part without noise.
DPMPP_2M: dict[str, Any] = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "variance_type": None,
}


def sampler(own: Any, *, name: str | None = None, spacing: str | None = None) -> Any:
    """The scheduler to sample with.

    Args:
        own: the model's scheduler, whose noise schedule is kept.
        name: one of DETERMINISTIC; None keeps the model's own kind.
        spacing: of the time steps; None keeps what the model's config says, if it says it.
    Raises:
        InputError: the model's own scheduler draws noise, or has no schedule to take over.
    """
    if name is None:
        refuse_stochastic(type(own).__name__, own.config)
        kind = type(own)
    else:
        kind = getattr(diffusers, DETERMINISTIC[name])
        _refuse_unfit(kind, own, name)
    changes: dict[str, Any] = {"timestep_spacing": spacing} if spacing else {}
    if kind is not type(own):
        changes |= _suiting(name)
    elif name == "dpmpp_2m":
        changes |= DPMPP_2M
    return kind.from_config(own.config, **changes)


def ddim_pair(own: Any) -> tuple[DDIMScheduler, DDIMInverseScheduler]:
    """DDIM and its inverse over the model's noise schedule, with equal settings in both.

    Few steps want trailing spacing: leading would start where noise of variance 1 does not
    belong.

    Raises:
        InputError: the model's scheduler has no schedule that DDIM could follow.
    """
    name = type(own).__name__
    refuse_foreign(name, own.config, field="noise.strategy", value="inversion")
    settings: dict[str, Any] = {
        "timestep_spacing": "trailing",
        "clip_sample": False,
        "steps_offset": 0,
        "set_alpha_to_one": own.config.get("set_alpha_to_one", True),
    }
    forward = DDIMScheduler.from_config(own.config, thresholding=False, **settings)
    return forward, DDIMInverseScheduler.from_config(forward.config, **settings)


def _suiting(name: str | None) -> dict[str, Any]:
    """What another kind of scheduler must be told beside the schedule."""
    # Latents have no range to clip to.
    changes: dict[str, Any] = {"clip_sample": False, "thresholding": False}
    if name == "pndm":
        changes["skip_prk_steps"] = True  # plain PLMS, as Stable Diffusion was published with
    return changes | (DPMPP_2M if name == "dpmpp_2m" else {})


def _refuse_unfit(kind: Any, own: Any, name: str) -> None:
    """Raises InputError where `kind` would follow another schedule than the model's."""
    refuse_foreign(type(own).__name__, own.config, field="generator.scheduler", value=name)
    if name == "pndm" and own.config.get("prediction_type") == "sample":
        raise InputError("generator.scheduler", name, "cannot sample a model that predicts images")
    zero_snr = "rescale_betas_zero_snr"
    if own.config.get(zero_snr) and zero_snr not in inspect.signature(kind).parameters:
        remedy = "does not know this model's betas (zero terminal SNR); use ddim, euler or dpmpp_2m"
        raise InputError("generator.scheduler", name, remedy)
