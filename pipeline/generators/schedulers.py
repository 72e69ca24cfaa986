"""Choose a sampler for a model's noise schedule, check it, and count its network calls.

Checks of a scheduler's config do without diffusers, which takes seconds to import.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semix.data.errors import InputError
from semix.data.files import read_json
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.model_paths import local_copy

if TYPE_CHECKING:
    from diffusers import DDIMInverseScheduler, DDIMScheduler
    from torch import Tensor

# Samplers without random noise: by default they have eta 0 or no churn.
DETERMINISTIC = {
    "ddim": "DDIMScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "deis": "DEISMultistepScheduler",
}
# Further samplers without random noise, which only models of their own can follow.
OWN = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")
CONSISTENCY = "CMStochasticIterativeScheduler"  # draws noise after every step but the last
PREDICTIONS = ("epsilon", "v_prediction", "sample")
FLOW = "FlowMatchEulerDiscreteScheduler"  # the one supported for flow transformers

# 2M is the second order of DPM-Solver++; a learned variance is not used without noise.
DPMPP_2M: Mapping[str, object] = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "variance_type": None,
}


def own_scheduler(folder: Path) -> Mapping[str, Any] | None:
    """The content of a model's scheduler_config.json; None if there is none."""
    path = folder / "scheduler" / "scheduler_config.json"
    return read_json(path) if path.is_file() else None


def check_deterministic(kind: str, config: Mapping[str, Any], *, steps: int) -> None:
    """Raises InputError for a model whose own scheduler may draw noise.

    Args:
        kind: class name of the scheduler.
        config: content of its scheduler_config.json.
        steps: of a sampling.
    """
    if kind == CONSISTENCY:
        if steps > 1:
            remedy = "a consistency model draws noise between steps; set it to 1"
            raise InputError("generator.steps", steps, remedy)
        return
    noisy = str(config.get("algorithm_type", "")).startswith("sde")
    if kind not in (*DETERMINISTIC.values(), *OWN) or noisy:
        choices = ", ".join(DETERMINISTIC)
        remedy = f"the model's own {kind} may draw noise at each step; choose one of {choices}"
        raise InputError("generator.scheduler", "nothing", remedy)


def check_flow_scheduler(kind: str, scheduler: Mapping[str, Any], config: GeneratorConfig) -> None:
    """Raises InputError for a flow model's unsuitable scheduler, and for settings it lacks."""
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


def check_schedule(kind: str, config: Mapping[str, Any], *, field: str, value: str) -> None:
    """Raises InputError for `field` if no DDIM-like sampler can follow the model's schedule.

    Flow matching and EDM have no betas.
    """
    predicts = config.get("prediction_type", "epsilon")
    if "beta_schedule" not in config or predicts not in PREDICTIONS:
        remedy = f"cannot follow the model's {kind} (no variance-preserving noise schedule)"
        raise InputError(field, value, remedy)


def network_calls(config: GeneratorConfig) -> int:
    """Calls of the network per sampling, without loading the sampler.

    A model that is not on this machine is assumed to have a sampler of one call per step.
    """
    if config.scheduler is not None:
        kind = DETERMINISTIC[config.scheduler]
    else:
        folder = local_copy(config.model, config.revision)
        kind = ((own_scheduler(folder) if folder else None) or {}).get("_class_name", "")
    if kind == DETERMINISTIC["heun"]:  # evaluates both ends of each step but the last
        return 2 * config.steps - 1
    # Without Runge-Kutta steps PNDM takes one step twice at the start.
    return config.steps + (kind == DETERMINISTIC["pndm"] and config.steps > 1)


def network_rows(config: GeneratorConfig, images: int, *, calls: int | None = None) -> int:
    """Rows of the network for a series of `images`; a row is one sample in one call.

    Args:
        calls: of the network per sampling; by default `network_calls`.
    """
    calls = network_calls(config) if calls is None else calls
    guided = [config.two_rows and config.guided(call, calls) for call in range(calls)]
    added = 0
    if config.enhance is not None:
        added = sum(
            config.enhance.added_rows(call, calls, guided=is_guided)
            for call, is_guided in enumerate(guided)
        )
    return images * (calls + sum(guided) + added)


def sampler(
    scheduler: Any, *, steps: int = 1, name: str | None = None, spacing: str | None = None
) -> Any:
    """The scheduler to sample with.

    Args:
        scheduler: the model's scheduler, whose noise schedule is kept.
        steps: of a sampling.
        name: one of DETERMINISTIC; None keeps the model's own kind.
        spacing: of the time steps; None keeps that of the model's config.
    Raises:
        InputError: the model's own scheduler draws noise, or has no schedule that can be kept.
    """
    import diffusers

    if isinstance(scheduler, FlowEuler):
        return scheduler
    if name is None:
        check_deterministic(type(scheduler).__name__, scheduler.config, steps=steps)
        kind = type(scheduler)
    else:
        kind = getattr(diffusers, DETERMINISTIC[name])
        _check_compatible(kind, scheduler, name)
    changes: dict[str, object] = {"timestep_spacing": spacing} if spacing else {}
    if kind is not type(scheduler):
        changes |= _settings_for(name)
    elif name == "dpmpp_2m":
        changes |= DPMPP_2M
    return kind.from_config(scheduler.config, **changes)


class FlowEuler:
    """A flow model's scheduler with the interface of the other schedulers.

    Args:
        scheduler: the model's FlowMatchEulerDiscreteScheduler.
        schedule: arguments of its `set_timesteps` for a number of steps.
    """

    init_noise_sigma = 1.0

    def __init__(self, scheduler: Any, schedule: Callable[[int], Mapping[str, Any]]) -> None:
        self.scheduler, self.schedule, self.config = scheduler, schedule, scheduler.config

    def set_timesteps(self, steps: int) -> None:
        self.scheduler.set_timesteps(steps, **self.schedule(steps))
        self.scheduler.set_begin_index(0)
        self.timesteps: Tensor = self.scheduler.timesteps

    def scale_model_input(self, latents: "Tensor", timestep: "Tensor") -> "Tensor":
        return latents

    def step(
        self, output: "Tensor", timestep: "Tensor", latents: "Tensor", *, return_dict: bool
    ) -> "tuple[Tensor]":
        return self.scheduler.step(output, timestep, latents, return_dict=return_dict)


class FlowEulerInverse:
    """Invert latents to noise over the steps of `FlowEuler` in reverse order.

    Like DDIM's inversion it evaluates the network at the less noisy latents, but at the time of the
    noisier ones. A better solver would recover every noise, and so distinguish none.
    """

    def __init__(self, forward: FlowEuler) -> None:
        self.forward = forward

    def set_timesteps(self, steps: int) -> None:
        self.forward.set_timesteps(steps)
        self.timesteps: Tensor = self.forward.timesteps.flip(0)
        self._widths = iter(-self.forward.scheduler.sigmas.diff().flip(0))

    def step(
        self, output: "Tensor", timestep: "Tensor", latents: "Tensor", *, return_dict: bool
    ) -> "tuple[Tensor]":
        return (latents + next(self._widths) * output,)


def inversion_pair(base: Any) -> tuple[Any, Any]:
    """A sampler over the model's schedule, and its inverse from images to noise.

    Raises:
        InputError: the model's scheduler has no schedule that DDIM could follow.
    """
    return (base, FlowEulerInverse(base)) if isinstance(base, FlowEuler) else ddim_pair(base)


def ddim_pair(scheduler: Any) -> "tuple[DDIMScheduler, DDIMInverseScheduler]":
    """DDIM and its inverse over the model's noise schedule, with equal settings in both.

    Few steps need trailing spacing: leading spacing would start at a time that does not suit noise
    of variance 1.

    Raises:
        InputError: the model's scheduler has no schedule that DDIM could follow.
    """
    from diffusers import DDIMInverseScheduler, DDIMScheduler

    name = type(scheduler).__name__
    check_schedule(name, scheduler.config, field="noise.strategy", value="inversion")
    settings = {
        "timestep_spacing": "trailing",
        "clip_sample": False,
        "steps_offset": 0,
        "set_alpha_to_one": scheduler.config.get("set_alpha_to_one", True),
    }
    forward = DDIMScheduler.from_config(scheduler.config, thresholding=False, **settings)
    return forward, DDIMInverseScheduler.from_config(forward.config, **settings)


def _settings_for(name: str | None) -> Mapping[str, object]:
    """Settings, beside the schedule, of a scheduler of another kind than the model's own."""
    # Latents have no range to clip to.
    changes: dict[str, object] = {"clip_sample": False, "thresholding": False}
    if name == "pndm":
        changes["skip_prk_steps"] = True  # plain PLMS, as Stable Diffusion was published with
    if name == "deis":
        changes["algorithm_type"] = "deis"  # also where the model's own scheduler draws noise
    return {**changes, **DPMPP_2M} if name == "dpmpp_2m" else changes


def _check_compatible(kind: Any, base: Any, name: str) -> None:
    """Raises InputError if `kind` would follow another schedule than the model's."""
    check_schedule(type(base).__name__, base.config, field="generator.scheduler", value=name)
    if name == "pndm" and base.config.get("prediction_type") == "sample":
        raise InputError("generator.scheduler", name, "cannot sample a model that predicts images")
    zero_snr = "rescale_betas_zero_snr"
    if base.config.get(zero_snr) and zero_snr not in inspect.signature(kind).parameters:
        remedy = "does not know this model's betas (zero terminal SNR); use ddim, euler or dpmpp_2m"
        raise InputError("generator.scheduler", name, remedy)
