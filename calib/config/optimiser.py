"""How weights follow gradients."""

from typing import Literal

from pydantic import Field

from data.settings import Settings


class OptimiserConfig(Settings):
    """Optimiser and learning rate; the defaults are those of the papers."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="optimiser")
    learning_rate: float = Field(0.1, gt=0, description="at its highest")
    momentum: float = Field(
        0.9, ge=0, lt=1, description="of sgd; the others have betas 0.9 and 0.999"
    )
    weight_decay: float = Field(5e-4, ge=0, description="on all weights")
    schedule: Literal["multistep", "cosine", "constant"] = Field(
        "multistep", description="of the learning rate; cosine falls to 0 with every step"
    )
    milestones: tuple[int, ...] = Field(
        (80, 120), description="multistep: epochs after which the learning rate falls"
    )
    factor: float = Field(0.1, gt=0, le=1, description="multistep: what it is multiplied with")
    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rate rises from 0")
    clip_norm: float | None = Field(
        2.0, gt=0, description="largest norm of the model's gradient; none does not clip"
    )
