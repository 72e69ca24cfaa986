"""Classifier-free guidance as in most families, with two rows per image."""

from torch import Tensor

from semix.pipeline.conditioning import Conditioning, concatenate


class GuidedDenoiser:
    """A denoiser with classifier-free guidance.

    Each image takes one unconditional and one conditional row of the batch.

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
        """The guided prediction, float32; if guidance_scale <= 1, the conditional prediction alone.

        Source: Ho and Salimans 2022, arXiv 2207.12598.
        """
        if guidance_scale <= 1:
            return self(latents, timestep, condition).float()
        both = concatenate([self.unconditional.expand(len(latents)), condition])
        return guided_sum(self(latents.repeat(2, 1, 1, 1), timestep, both), guidance_scale)


def guided_sum(both: Tensor, guidance_scale: float) -> Tensor:
    """uncond + w (cond - uncond), [B, C, h, w] float32, of predictions [2 B, C, h, w]."""
    unconditional, conditional = both.float().chunk(2)
    return unconditional + guidance_scale * (conditional - unconditional)
