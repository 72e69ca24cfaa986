import torch

from pipeline.noise import initial_noise


def test_a_seed_gives_the_same_noise_in_any_batch():
    together = initial_noise([5, 7, 9], (4, 8, 8))
    assert torch.equal(together[1], initial_noise([7], (4, 8, 8))[0])
    assert not torch.equal(together[0], together[1])


def test_noise_is_standard_normal_float32():
    noise = initial_noise(range(64), (4, 16, 16))
    assert noise.dtype == torch.float32
    torch.testing.assert_close(noise.std(), torch.tensor(1.0), atol=0.02, rtol=0)
    torch.testing.assert_close(noise.mean(), torch.tensor(0.0), atol=0.02, rtol=0)
