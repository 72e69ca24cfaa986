import pytest
import torch

from pipeline.conditioning import Conditioning
from pipeline.mixing import conditions, mix_groups, refuse_degenerate
from pipeline.noise import initial_noise
from pipeline.plan import MixGroup

PAIR = ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0))
GROUPS = [MixGroup(7, (0, 1), 11, PAIR), MixGroup(9, (1, 2), 12, PAIR)]
EMBEDDINGS = Conditioning(torch.tensor([[[1.0]], [[10.0]], [[100.0]]]))


class Recorder:
    """A generator whose images are its noise plus its conditioning: what went in can be read."""

    latent_shape = (1, 2, 2)
    device = torch.device("cpu")
    broken: float | None = None

    def encode(self, names):
        raise AssertionError("embeddings are given")

    def sample(self, noise, condition, alphas=None):
        latents = noise + condition.tokens[:, :, :, None]
        if self.broken is not None:
            latents[4] = self.broken
        return latents

    def decode(self, latents):
        rounded = latents.round().clamp(0, 255).to(torch.uint8)
        return rounded.permute(0, 2, 3, 1).expand(-1, -1, -1, 3)


def mixed(generator: Recorder, batch_groups: int) -> torch.Tensor:
    noise = 3 * initial_noise([group.seed for group in GROUPS], generator.latent_shape)
    return mix_groups(
        GROUPS, noise, embeddings=EMBEDDINGS, generator=generator, batch_groups=batch_groups
    )


def test_rows_come_series_by_series_each_with_its_own_mixture():
    found = conditions(GROUPS, EMBEDDINGS, "linear").tokens.flatten()
    torch.testing.assert_close(found, torch.tensor([10, 5.5, 1, 100, 55, 10]))


def test_padding_is_cut_off_again():
    generator = Recorder()
    assert torch.equal(mixed(generator, 5), mixed(generator, 2))
    assert mixed(generator, 5).shape == (2, 3, 2, 2, 3)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (float("nan"), FloatingPointError, "group 9: latents 1 has NaN or infinite values"),
        (float("inf"), FloatingPointError, "group 9: latents 1 has NaN or infinite values"),
        (0.5, ValueError, r"group 9: latents 1 is one flat value \(0.5\)"),
    ],
)
def test_broken_latents_are_named_by_their_group(value, error, message):
    generator = Recorder()
    generator.broken = value
    with pytest.raises(error, match=message):
        mixed(generator, 2)


def test_an_image_of_one_colour_is_named():
    images = torch.randint(255, (6, 4, 4, 3), generator=torch.Generator().manual_seed(0))
    images[2] = 0
    with pytest.raises(ValueError, match=r"group 7: image 2 is one flat value \(0\)"):
        refuse_degenerate(images.to(torch.uint8), GROUPS, "image")


def test_what_is_wrong_with_padding_alone_harms_nobody():
    values = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    values[8] = torch.nan
    refuse_degenerate(values, GROUPS, "latents")
