"""NoiseConfig: where the initial noise of a series comes from."""

from typing import Literal, Self

from pydantic import Field, model_validator

from data.settings import Settings


class NoiseConfig(Settings):
    """Chosen noise (Qi et al. 2024, arXiv 2407.14041): stable under sampling and inversion."""

    strategy: Literal["random", "select", "optimise"] = Field(
        "random",
        description="random; select: the most stable of `candidates`; optimise: gradient descent "
        "from the most stable one",
    )
    candidates: int = Field(8, ge=1, description="noises scored for each series")
    steps: int = Field(
        10, ge=1, description="steps of sampling and of inversion; never more than generator.steps"
    )
    guidance_scale: float = Field(
        1.0, ge=0, description="of both passes; at most 1 scores without guidance"
    )
    alphas: tuple[float, ...] = Field(
        (0.0, 0.5, 1.0), min_length=1, description="where on the series the score is taken"
    )
    reduce: Literal["mean", "min"] = Field("mean", description="of the scores over the alphas")
    halving: bool = Field(
        False,
        description="score all candidates with 7/10 of the steps in the middle of the series, and "
        "only the best quarter in full",
    )
    iterations: int = Field(100, ge=1, description="gradient steps of optimise")
    learning_rate: float = Field(
        100.0, gt=0, description="of optimise, scaled by the noise's norm / 256"
    )
    momentum: float = Field(0.5, ge=0, lt=1, description="of optimise")
    detach_target: bool = Field(
        False, description="optimise towards the inverted noise as a constant: cheaper"
    )
    max_cost: float = Field(
        2.0, gt=0, description="refuse to spend more than this many times the cost of generating"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for alpha in self.alphas:
            if not 0 <= alpha <= 1:
                raise ValueError(f"`alphas`: {alpha} must lie in [0, 1]; 1 is the first class")
        return self
