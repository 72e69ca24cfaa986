"""MixingConfig: which classes are mixed, in which proportions, how often."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from data.settings import Settings


class PairsConfig(Settings):
    """Which sets of classes (pairs, unless mixing.classes says more) are mixed."""

    kind: Literal["all", "sampled", "named", "similar"] = Field(
        "all",
        description="all; sampled: `count` drawn uniformly; named: those in `names`; similar: "
        "`count` drawn by the similarity of their CLIP prototypes",
    )
    count: int | None = Field(None, ge=1, description="how many, for sampled and similar")
    names: tuple[tuple[str, ...], ...] = Field(
        (), description="for named: lists of class names, as [[cat, dog], [cat, fox]]"
    )
    temperature: float = Field(
        0.05,
        gt=0,
        description="for similar: pairs are drawn by exp(cosine / temperature), without repeats",
    )

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        if (self.count is not None) != (self.kind in ("sampled", "similar")):
            raise ValueError("`count` belongs to kind sampled or similar, and only to them")
        if bool(self.names) != (self.kind == "named"):
            raise ValueError("`names` belongs to kind named, and only to it")
        return self


class MixingConfig(Settings):
    """Which series are made."""

    classes: int = Field(
        2, ge=2, le=6, description="classes mixed in a series; 3 or more fill a simplex"
    )
    pairs: PairsConfig = PairsConfig()
    alphas: int | tuple[float, ...] = Field(
        8, description="images a series; or the weights of the first class themselves"
    )
    grid: Literal["even", "interior", "random"] = Field(
        "even",
        description="a count of alphas lies evenly from 0 to 1, denser in the middle, or at random "
        "points of each series; all keep the end points",
    )
    groups_per_pair: int = Field(
        ge=1, description="series of each unordered pair of classes, each from a noise of its own"
    )
    interpolation: Literal["linear", "spherical"] = Field(
        "linear", description="path between the conditionings"
    )
    seed: int = Field(0, ge=0, description="seed of all initial noises")

    @field_validator("alphas")
    @classmethod
    def _lie_in_range(cls, alphas: int | tuple[float, ...]) -> int | tuple[float, ...]:
        if isinstance(alphas, int):
            if not 2 <= alphas <= 100:
                raise ValueError("give 2 to 100 images a series")
            return alphas
        if not 2 <= len(alphas) <= 100:
            raise ValueError("give 2 to 100 alphas")
        for alpha in alphas:
            if not 0 <= alpha <= 1:
                raise ValueError(f"{alpha} must lie in [0, 1]; 1 is the first class")
        return alphas

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not isinstance(self.alphas, int) and self.grid != "even":
            raise ValueError(f"`grid: {self.grid}` wants a count of alphas, not the alphas")
        if self.classes == 2:
            return self
        if not isinstance(self.alphas, int) or self.grid != "random":
            raise ValueError("mixing 3 or more classes wants a count of alphas and `grid: random`")
        if self.alphas < self.classes:
            raise ValueError(f"`alphas` must be at least {self.classes}: each class comes pure")
        if self.interpolation != "linear" or self.pairs.kind == "similar":
            raise ValueError("spherical paths and similar pairs are defined for 2 classes only")
        return self

    @property
    def images(self) -> int:
        """Images in a series."""
        return self.alphas if isinstance(self.alphas, int) else len(self.alphas)
