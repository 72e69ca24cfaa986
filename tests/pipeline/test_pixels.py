import numpy as np
import torch
from PIL import Image

from pipeline.pixels import resized


def test_scaling_down_takes_the_mean_of_what_a_pixel_covers():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2, 3, 32, 32, 3), generator=generator, dtype=torch.uint8)
    small = resized(images, 8)
    assert small.shape == (2, 3, 8, 8, 3)
    for group in range(2):
        for position in range(3):
            pillow = Image.fromarray(images[group, position].numpy()).resize(
                (8, 8), Image.Resampling.BOX
            )
            # Pillow rounds after each of its two passes.
            difference = small[group, position].int() - torch.from_numpy(np.array(pillow)).int()
            assert difference.abs().max() <= 1
    blocks = images.double().unflatten(2, (8, 4)).unflatten(4, (8, 4))
    torch.testing.assert_close(small, blocks.mean((3, 5)).round().to(torch.uint8), atol=0, rtol=0)


def test_no_size_or_the_same_leaves_the_pixels():
    images = torch.zeros(1, 1, 8, 8, 3, dtype=torch.uint8)
    assert resized(images, None) is images
    assert resized(images, 8) is images
