"""Classifier-free guidance as most families have it: two rows an image."""

from torch import Tensor

from pipeline.conditioning import Conditioning, concatenate


class TwoRows:
    """A denoiser that is asked with and without the condition.

    Attributes:
        unconditional: one row, the same for every class.
    """

    unconditional: Conditioning

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        """The network's prediction [B, C, h, w], B rows."""
        raise NotImplementedError

    def guided(
        self, latents: Tensor, timestep: Tensor, condition: Conditioning, guidance_scale: float
    ) -> Tensor:
        """uncond + w (cond - uncond), float32; w at most 1 is cond alone.

        Source: Ho and Salimans 2022, arXiv 2207.12598.
        """
        if guidance_scale <= 1:
            return self(latents, timestep, condition).float()
        both = concatenate([self.unconditional.expand(len(latents)), condition])
        without, given = self(latents.repeat(2, 1, 1, 1), timestep, both).chunk(2)
        return without.float() + guidance_scale * (given.float() - without.float())
