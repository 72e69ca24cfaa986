"""A batch of MixGroups to images: exactly one noise a group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.conditioning import Conditioning, concatenate, mix
from pipeline.generators import Generator
from pipeline.plan import MixGroup


def mix_groups(
    groups: Sequence[MixGroup],
    noise: Tensor,
    *,
    embeddings: Conditioning,
    generator: Generator,
    batch_groups: int,
    interpolation: str = "linear",
) -> Tensor:
    """Generate all series of some groups in one forward batch.

    Args:
        groups: at most `batch_groups`; fewer are padded with the last one and cut off again,
            because the batch layout moves the last bits of an image.
        noise: float32 [G, C, h, w], one a group.
        embeddings: of all classes, one row each.
    Returns:
        uint8 [G, A, H, W, 3] on the generator's device.
    Raises:
        FloatingPointError: latents that are not numbers, by the group.
        ValueError: latents or an image of one value, by the group.
    """
    missing = batch_groups - len(groups)
    padded = [*groups, *[groups[-1]] * missing]
    noise = torch.cat([noise, noise[-1:].expand(missing, *noise.shape[1:])])
    count = len(padded[0].mixture)
    latents = generator.sample(
        noise.repeat_interleave(count, dim=0),
        conditions(padded, embeddings, interpolation),
        torch.tensor([group.alphas for group in padded]),
    )
    refuse_degenerate(latents, groups, "latents")
    images = generator.decode(latents)
    refuse_degenerate(images, groups, "image")
    return images.view(batch_groups, count, *images.shape[1:])[: len(groups)]


def conditions(
    groups: Sequence[MixGroup], embeddings: Conditioning, interpolation: str
) -> Conditioning:
    """One row for each image of each group, group by group."""
    return concatenate(
        mix(embeddings, group.classes, torch.tensor(group.mixture), interpolation)
        for group in groups
    )


def refuse_degenerate(values: Tensor, groups: Sequence[MixGroup], kind: str) -> None:
    """Raises for the first of G x A latents or images that is not finite, or has no contrast.

    Args:
        values: at least G x A rows; those after them are padding.
    """
    count = len(groups[0].mixture)
    flat = values[: len(groups) * count].flatten(1)
    least, most = flat.amin(1), flat.amax(1)

    def where(row: int) -> str:
        return f"group {groups[row // count].index}: {kind} {row % count}"

    for row in (~torch.isfinite(most) | ~torch.isfinite(least)).nonzero()[:1, 0].tolist():
        raise FloatingPointError(f"{where(row)} has NaN or infinite values; try another dtype")
    for row in (least == most).nonzero()[:1, 0].tolist():
        raise ValueError(f"{where(row)} is one flat value ({float(most[row]):g})")
