"""Samplers of a model's noise schedule: which will do, how often they call its network.

What a scheduler's config tells is told without diffusers, which takes seconds to import.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.data.files import read_json
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.model_paths import copy_here

if TYPE_CHECKING:
    from diffusers import DDIMInverseScheduler, DDIMScheduler
    from torch import Tensor

# Kinds that map one noise to one image, with eta 0 or no churn, as their defaults are.
DETERMINISTIC = {
    "ddim": "DDIMScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "deis": "DEISMultistepScheduler",
}
PREDICTIONS = ("epsilon", "v_prediction", "sample")
FLOW = "FlowMatchEulerDiscreteScheduler"  # of flow transformers, the one that is taken

# 2M is the second order of DPM-Solver++; a learned variance plays no part without noise.
DPMPP_2M: Mapping[str, object] = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "variance_type": None,
}


def own_scheduler(folder: Path) -> Mapping[str, Any] | None:
    """What a model's scheduler_config.json holds; None if there is none."""
    path = folder / "scheduler" / "scheduler_config.json"
    return read_json(path) if path.is_file() else None


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


def refuse_flow(kind: str, scheduler: Mapping[str, Any], config: GeneratorConfig) -> None:
    """Raises InputError for a flow model's scheduler that is no Euler or draws noise, and for
    settings that it does not have."""
    if config.scheduler is not None:
        remedy = "a flow model keeps its own sampler; leave it out"
        raise InputError("generator.scheduler", config.scheduler, remedy)
    if config.timestep_spacing is not None:
        remedy = "a flow model's steps follow its own shift; leave it out"
        raise InputError("generator.timestep_spacing", config.timestep_spacing, remedy)
    remedy = ""
    if kind != FLOW:
        remedy = f"the model's own {kind} is no sampler of flow models here; let its config name "
        remedy += FLOW
    elif scheduler.get("stochastic_sampling"):
        remedy = f"the model's own {kind} draws noise at each step; set stochastic_sampling to "
        remedy += "false in its config"
    if remedy:
        raise InputError("generator.scheduler", "nothing", remedy)


def refuse_foreign(kind: str, config: Mapping[str, Any], *, field: str, value: str) -> None:
    """Raises InputError, for `field`, where no DDIM-like sampler can follow the model's schedule.

    Flow matching and EDM have no betas.
    """
    predicts = config.get("prediction_type", "epsilon")
    if "beta_schedule" not in config or predicts not in PREDICTIONS:
        remedy = f"cannot follow the model's {kind} (no variance-preserving noise schedule)"
        raise InputError(field, value, remedy)


def network_calls(config: GeneratorConfig) -> int:
    """Calls of the network in one sampling, told without the sampler itself.

    A model that is not here is taken to bring a sampler of one call a step.
    """
    if config.scheduler is not None:
        kind = DETERMINISTIC[config.scheduler]
    else:
        folder = copy_here(config.model, config.revision)
        kind = ((own_scheduler(folder) if folder else None) or {}).get("_class_name", "")
    if kind == DETERMINISTIC["heun"]:  # looks at both ends of each step but the last
        return 2 * config.steps - 1
    # PNDM starts by taking one step twice, in the form without Runge-Kutta steps.
    return config.steps + (kind == DETERMINISTIC["pndm"] and config.steps > 1)


def network_rows(config: GeneratorConfig, images: int, *, calls: int | None = None) -> int:
    """Rows of the network for a series of so many images; one is one sample in one call.

    Args:
        calls: of the network in one sampling; by default `network_calls`.
    """
    calls = network_calls(config) if calls is None else calls
    again = sum(config.guided(call, calls) for call in range(calls)) if config.two_rows else 0
    return images * (calls + again)


def sampler(own: Any, *, name: str | None = None, spacing: str | None = None) -> Any:
    """The scheduler to sample with.

    Args:
        own: the model's scheduler, whose noise schedule is kept.
        name: one of DETERMINISTIC; None keeps the model's own kind.
        spacing: of the time steps; None keeps what the model's config says, if it says it.
    Raises:
        InputError: the model's own scheduler draws noise, or has no schedule to take over.
    """
    import diffusers

    if isinstance(own, FlowEuler):
        return own
    if name is None:
        refuse_stochastic(type(own).__name__, own.config)
        kind = type(own)
    else:
        kind = getattr(diffusers, DETERMINISTIC[name])
        _refuse_unfit(kind, own, name)
    changes: dict[str, object] = {"timestep_spacing": spacing} if spacing else {}
    if kind is not type(own):
        changes |= _suiting(name)
    elif name == "dpmpp_2m":
        changes |= DPMPP_2M
    return kind.from_config(own.config, **changes)


class FlowEuler:
    """A flow model's scheduler behind the door of the others: noise of variance 1, latents as
    they are.

    Args:
        own: the model's FlowMatchEulerDiscreteScheduler.
        schedule: what its `set_timesteps` takes for so many steps.
    """

    init_noise_sigma = 1.0

    def __init__(self, own: Any, schedule: Callable[[int], Mapping[str, Any]]) -> None:
        self.own, self.schedule, self.config = own, schedule, own.config

    def set_timesteps(self, steps: int) -> None:
        self.own.set_timesteps(steps, **self.schedule(steps))
        self.own.set_begin_index(0)
        self.timesteps: Tensor = self.own.timesteps

    def scale_model_input(self, latents: "Tensor", timestep: "Tensor") -> "Tensor":
        return latents

    def step(
        self, output: "Tensor", timestep: "Tensor", latents: "Tensor", *, return_dict: bool
    ) -> "tuple[Tensor]":
        return self.own.step(output, timestep, latents, return_dict=return_dict)


class FlowEulerInverse:
    """From latents back to noise over the steps of `FlowEuler`, the last first.

    As DDIM's inversion it takes the prediction at the less noisy latents, told the time of the
    noisier ones. A better solver would come back to every noise, and so tell none apart.
    """

    def __init__(self, forward: FlowEuler) -> None:
        self.forward = forward

    def set_timesteps(self, steps: int) -> None:
        self.forward.set_timesteps(steps)
        self.timesteps: Tensor = self.forward.timesteps.flip(0)
        self._widths = iter(-self.forward.own.sigmas.diff().flip(0))

    def step(
        self, output: "Tensor", timestep: "Tensor", latents: "Tensor", *, return_dict: bool
    ) -> "tuple[Tensor]":
        return (latents + next(self._widths) * output,)


def inversion_pair(own: Any) -> tuple[Any, Any]:
    """A sampler over the model's schedule, and what takes its images back to noise.

    Raises:
        InputError: the model's scheduler has no schedule that DDIM could follow.
    """
    return (own, FlowEulerInverse(own)) if isinstance(own, FlowEuler) else ddim_pair(own)


def ddim_pair(own: Any) -> "tuple[DDIMScheduler, DDIMInverseScheduler]":
    """DDIM and its inverse over the model's noise schedule, with equal settings in both.

    Few steps want trailing spacing: leading would start where noise of variance 1 does not
    belong.

    Raises:
        InputError: the model's scheduler has no schedule that DDIM could follow.
    """
    from diffusers import DDIMInverseScheduler, DDIMScheduler

    name = type(own).__name__
    refuse_foreign(name, own.config, field="noise.strategy", value="inversion")
    settings = {
        "timestep_spacing": "trailing",
        "clip_sample": False,
        "steps_offset": 0,
        "set_alpha_to_one": own.config.get("set_alpha_to_one", True),
    }
    forward = DDIMScheduler.from_config(own.config, thresholding=False, **settings)
    return forward, DDIMInverseScheduler.from_config(forward.config, **settings)


def _suiting(name: str | None) -> Mapping[str, object]:
    """What another kind of scheduler must be told beside the schedule."""
    # Latents have no range to clip to.
    changes: dict[str, object] = {"clip_sample": False, "thresholding": False}
    if name == "pndm":
        changes["skip_prk_steps"] = True  # plain PLMS, as Stable Diffusion was published with
    if name == "deis":
        changes["algorithm_type"] = "deis"  # also where the model's own draws noise
    return {**changes, **DPMPP_2M} if name == "dpmpp_2m" else changes


def _refuse_unfit(kind: Any, own: Any, name: str) -> None:
    """Raises InputError where `kind` would follow another schedule than the model's."""
    refuse_foreign(type(own).__name__, own.config, field="generator.scheduler", value=name)
    if name == "pndm" and own.config.get("prediction_type") == "sample":
        raise InputError("generator.scheduler", name, "cannot sample a model that predicts images")
    zero_snr = "rescale_betas_zero_snr"
    if own.config.get(zero_snr) and zero_snr not in inspect.signature(kind).parameters:
        remedy = "does not know this model's betas (zero terminal SNR); use ddim, euler or dpmpp_2m"
        raise InputError("generator.scheduler", name, remedy)
