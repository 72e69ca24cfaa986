"""A denoiser that computes its deep features for some steps and some alphas only."""

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipeline.conditioning import Conditioning
from pipeline.config import ApproximationConfig
from pipeline.generators.approximate.anchors import Anchors
from pipeline.generators.approximate.shallow import captured, shallow_pass

if TYPE_CHECKING:
    from pipeline.generators.latent_diffusion import Denoiser


def cache_setting(settings: ApproximationConfig) -> str | None:
    """Name of the setting that asks for a cache, if one does."""
    if settings.cache_anchors is not None:
        return "generator.approximate.cache_anchors"
    return "generator.approximate.cache_steps" if settings.cache_steps > 1 else None


class CachedDenoiser:
    """Deep features are kept from one step to the next (DeepCache, Ma et al. 2024), and those
    between anchors interpolated along alpha.

    One instance serves one sampling of one batch.

    Args:
        alphas: [G, A] of the series; only read where there are anchors.
        anchors: images of a series with features of their own; None for all.
    Raises:
        ValueError: anchors without alphas.
    """

    def __init__(
        self, denoiser: "Denoiser", *, alphas: Tensor | None = None, anchors: int | None = None
    ) -> None:
        self.denoiser = denoiser
        self._deep: Tensor | None = None
        self._anchors: dict[int, Anchors] = {}  # by rows in a call: one or two for each image
        if anchors is not None:
            if alphas is None:
                raise ValueError("cache_anchors: sample needs the alphas [G, A] of its rows")
            device = denoiser.pipeline.device
            for times in (1, 2):
                repeated = alphas.repeat(times, 1)
                self._anchors[repeated.numel()] = Anchors(repeated, anchors, device=device)

    def __call__(
        self, latents: Tensor, timestep: Tensor, condition: Conditioning, *, fresh: bool
    ) -> Tensor:
        """The prediction [B, C, h, w]; B may hold all series twice, without the condition first.

        Args:
            fresh: compute deep features; else those of the last time serve.
        """
        if not fresh:
            assert self._deep is not None, "the first step computes"
            # Without guidance only the later half is left, that with the condition.
            return self._shallow(latents, timestep, condition, self._deep[-len(latents) :])
        if not self._anchors:
            output, self._deep = self._full(latents, timestep, condition)
            return output
        anchors = self._anchors[len(latents)]
        rows, others = anchors.rows, anchors.others
        of_anchors, deep = self._full(latents[rows], timestep, condition[rows])
        between = anchors.to_others(deep)
        of_others = self._shallow(latents[others], timestep, condition[others], between)
        self._deep = anchors.merge(deep, between)
        return anchors.merge(of_anchors, of_others)

    def _full(
        self, latents: Tensor, timestep: Tensor, condition: Conditioning
    ) -> tuple[Tensor, Tensor]:
        with captured(self.denoiser.network) as found:
            output = self.denoiser(latents, timestep, condition)
        (deep,) = found
        return output, deep

    def _shallow(
        self, latents: Tensor, timestep: Tensor, condition: Conditioning, deep: Tensor
    ) -> Tensor:
        twin: Any = copy(self.denoiser)  # the same model with another network
        twin.network = partial(shallow_pass, self.denoiser.network, deep)
        return twin(latents, timestep, condition)
