"""Go back and forth at each step of sampling, so that an image shows more of its condition.

All of them are deterministic: they draw no noise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from semix.data.errors import InputError
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import EnhanceConfig, GeneratorConfig
from semix.pipeline.generators.schedulers import DETERMINISTIC, FlowEuler

# (latents, timestep, condition, guidance scale) to the model's prediction.
Predict = Callable[[Tensor, Tensor, Conditioning, float], Tensor]


@dataclass(frozen=True)
class Step:
    """One step of sampling, from the noisier latents x_t to x_s.

    Attributes:
        call: its number; timestep: t, as the network takes it; time: t, as the scheduler takes it.
        predict: of the model that goes back.
        forward: the step itself.
        unconditional: as many rows as the condition.
    """

    call: int
    timestep: Tensor
    time: Tensor
    condition: Conditioning
    unconditional: Conditioning
    predict: Predict
    forward: Callable[[Tensor], Tensor]


class Enhancer(Protocol):
    """How one enhanced step is made."""

    def begin(self, steps: int) -> None:
        """Called before the first step of a sampling."""

    def __call__(self, latents: Tensor, step: Step) -> Tensor:
        """x_s, from x_t."""


def build_enhancer(config: GeneratorConfig, scheduler: Any) -> Enhancer | None:
    """The enhancer of these settings over a sampler's schedule; None without one.

    Raises:
        InputError: a sampler that it cannot go back with.
    """
    if config.enhance is None:
        return None
    if config.enhance.name == "reflect":
        assert isinstance(scheduler, FlowEuler), "the settings allow sd3 and flux only"
        # FLUX takes the scale as an input of the network; elsewhere the tokens guide.
        return Reflection(
            config.enhance, scheduler, guidance=1.0 if config.two_rows else config.guidance_scale
        )
    if (kind := type(scheduler).__name__) != DETERMINISTIC["ddim"]:  # a hub model's own
        remedy = f"inverts DDIM's steps, not the model's own {kind}; set generator.scheduler: ddim"
        raise InputError("generator.enhance.name", config.enhance.name, remedy)
    return Zigzag(config.enhance, scheduler)


class Zigzag:
    """A step, DDIM's inversion of it with weaker guidance, and the step again.

    The gap in guidance adds a little of the condition at each step. As in inversion elsewhere, the
    network is evaluated at the less noisy latents, but at the time of the noisier ones.

    Source: Z-Sampling, Bai et al. 2024, arXiv 2412.10891, whose step back is unconditional; W2SD,
        Bai et al. 2025, arXiv 2502.00473, whose weak model is the conditional one without guidance.
    """

    def __init__(self, config: EnhanceConfig, scheduler: Any) -> None:
        from diffusers import DDIMInverseScheduler

        self.guidance = config.back_guidance
        settings = {"clip_sample": False}
        self.inverse = DDIMInverseScheduler.from_config(scheduler.config, **settings)

    def begin(self, steps: int) -> None:
        self.inverse.set_timesteps(steps)

    def __call__(self, latents: Tensor, step: Step) -> Tensor:
        ahead = step.forward(latents)
        condition = step.condition if self.guidance else step.unconditional
        output = step.predict(ahead, step.timestep, condition, max(self.guidance, 1.0))
        back = self.inverse.step(output, step.time, ahead, return_dict=False)[0]
        return step.forward(back)


class Reflection:
    """Steps ahead with a strengthened condition and back with a weakened one, before each step.

    A condition c becomes c + s ((1 - beta) c + beta c_null) in its tokens; pooled parts stay. The
    latents move by a part of what the way there and back changed.

    Source: RF-Sampling, arXiv 2603.06165, and its code.
    """

    def __init__(self, config: EnhanceConfig, scheduler: FlowEuler, *, guidance: float) -> None:
        self.config, self.scheduler, self.guidance = config, scheduler, guidance

    def begin(self, steps: int) -> None:
        pass

    def __call__(self, latents: Tensor, step: Step) -> Tensor:
        config, sigmas = self.config, self.scheduler.scheduler.sigmas
        times = self.scheduler.timesteps
        last = min(step.call + config.reflect_steps, len(times) - 1)
        moved = latents
        strong = shifted(step, config.ahead_strength, config.ahead_null)
        for position in range(step.call, last):
            velocity = step.predict(moved, times[position], strong, self.guidance)
            moved = moved + (sigmas[position + 1] - sigmas[position]) * velocity
        weak = shifted(step, config.back_strength, config.back_null)
        for position in range(last, step.call, -1):
            velocity = step.predict(moved, times[position], weak, self.guidance)
            moved = moved + (sigmas[position - 1] - sigmas[position]) * velocity
        return step.forward(latents + config.merge * (moved - latents))


def shifted(step: Step, strength: float, null_share: float) -> Conditioning:
    """c + s ((1 - beta) c + beta c_null), in the tokens alone."""
    condition, null = step.condition, step.unconditional
    direction = (1 - null_share) * condition.tokens + null_share * null.tokens
    return Conditioning(condition.tokens + strength * direction, condition.pooled)
