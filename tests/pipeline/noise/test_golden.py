"""Golden Noise: held to a plain reading of its formulas; in a build; files that do not fit."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from semix.data.errors import InputError
from semix.pipeline.checks import check_models
from semix.pipeline.noise import initial_noise
from semix.pipeline.noise.golden import SWIN, GoldenNoise, load_golden
from semix.pipeline.plan import build_of
from tests.pipeline.roots import altered, begun, create_root, made, samples

SIZE = 8


def condition_size(standins) -> int:
    from semix.pipeline.config import GeneratorConfig
    from semix.pipeline.generators import load_generator

    generator = load_generator(GeneratorConfig(model=str(standins.diffusion)), device="cpu")
    return generator.encode(["one"]).tokens[0].numel()


@pytest.fixture(scope="module")
def network(hasty_standins, tmp_path_factory):
    """A file of random weights for the small model."""
    torch.manual_seed(0)
    golden = GoldenNoise(SIZE, condition_size(hasty_standins))
    golden.alpha.data.fill_(0.7)
    golden.beta.data.fill_(0.3)
    path = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    tensors = {name: t.contiguous() for name, t in golden.state_dict().items()}
    save_file({**tensors, "unet_svd.bn.weight": torch.ones(2 * SIZE)}, path)  # not used
    return path


def plain(weights, noise, tokens):
    """The formulas of the paper's code, one after the other."""

    def linear(name, x):
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def mlp(name, x):
        return linear(f"unet_svd.{name}.2", linear(f"unet_svd.{name}.0", x).relu())

    scale, shift = linear("embeeding.linear", tokens.flatten(1))[..., None, None].chunk(2, dim=1)
    text = functional.group_norm(noise, 1, eps=1e-6) * (1 + scale) + shift
    swin = timm.create_model(SWIN, pretrained=False).eval()
    prefix = "unet_embedding.swin."
    own = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
    swin.load_state_dict(own)

    def conv(name, x):
        key = f"unet_embedding.{name}"
        return functional.conv2d(x, weights[f"{key}.weight"], weights[f"{key}.bias"])

    small = conv("downconv", functional.interpolate(noise + text, [224, 224]))
    seen = functional.interpolate(swin.forward_features(small), [SIZE, SIZE])
    embedded = conv("upconv", seen)

    top, bottom = (torch.cat([noise[:, i], noise[:, i + 1]], -1) for i in (0, 2))
    matrix = torch.cat([top, bottom], -2)
    u, s, v = torch.linalg.svd(matrix)
    x = mlp("mlp1", u.transpose(1, 2)) + mlp("mlp2", v) + linear("unet_svd.mlp3.0", s).unsqueeze(1)
    qkv = linear("unet_svd.attention.qkv", x)
    heads = []
    for q, k, w in zip(*(part.chunk(8, -1) for part in qkv.chunk(3, -1)), strict=True):
        heads.append((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ w)
    mixed = torch.cat(heads, -1)
    attended = linear("unet_svd.attention.proj", mixed).mean(1)
    changed = mlp("mlp4", attended) + s
    out = torch.einsum("bij,bj,bjk->bik", u, changed, v)
    out = torch.stack([block for row in out.chunk(2, 1) for block in row.chunk(2, 2)], 1)
    gate = 2 * torch.sigmoid(weights["alpha"]) - 1
    return out + gate * text + weights["beta"] * embedded


@torch.no_grad()
def test_it_is_what_the_authors_formulas_say(network, hasty_standins):
    size = condition_size(hasty_standins)
    golden = load_golden(str(network), latent_shape=(4, SIZE, SIZE), condition_size=size)
    noise, tokens = initial_noise([0, 1], (4, SIZE, SIZE)), torch.randn(2, size)
    expected = plain(load_file(network), noise, tokens)
    torch.testing.assert_close(golden(noise, tokens), expected, atol=1e-4, rtol=1e-4)
    assert (golden(noise, tokens) - noise).abs().max() > 0.1


FEW = ("mixing.pairs={kind: sampled, count: 3}", "shards.groups_per_shard=3")


def test_a_series_keeps_one_changed_noise_and_its_plan_the_network(network, hasty_config, tmp_path):
    config = altered(hasty_config, f"noise={{strategy: golden, network: {network}}}", *FEW)
    root = made(config, tmp_path / "root")
    notes = [sample.record.noise for sample in samples(root).values()]
    assert [note["strategy"] for note in notes] == ["golden"] * 3
    assert len({note["digest"] for note in notes}) == 3
    plain_root = made(altered(hasty_config, *FEW), tmp_path / "plain")
    images = [samples(each)[0].images for each in (root, plain_root)]
    assert images[0] != images[1]
    identity = root.stored_plan.models["generator"]["noise"]
    assert list(identity["files"]) == ["golden.safetensors"]
    moved = tmp_path / "elsewhere.safetensors"
    moved.write_bytes(network.read_bytes())
    again = altered(config, f"noise.network={moved}")
    assert create_root(again, root.url).stored_plan == root.stored_plan
    other = load_file(network) | {"beta": torch.tensor(0.9)}
    save_file(other, tmp_path / "other.safetensors")
    changed = altered(config, f"noise.network={tmp_path / 'other.safetensors'}")
    assert begun(changed, tmp_path / "new").stored_plan.digest != root.stored_plan.digest
    assert build_of(root).config.noise.network == str(network)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"x": torch.zeros(1)}, "holds no unet_svd.mlp1.0.weight; it is no network of"),
        (
            lambda t: {n: v for n, v in t.items() if "mlp4" not in n},
            "lacks unet_svd.mlp4.0.bias",
        ),
        (
            lambda t: {n: v for n, v in t.items() if "bias_table" not in n},
            "lacks unet_embedding.swin.*relative_position_bias_table",
        ),
        (lambda t: t, r"was made for latents \[4, 8, 8\] .* this model has \[4, 16, 16\]"),
    ],
)
def test_a_file_of_another_network_is_named(network, tmp_path, change, message):
    path = tmp_path / "other.safetensors"
    save_file(change(load_file(network)), path)
    with pytest.raises(InputError, match=f"noise.network = .*other.safetensors: {message}"):
        load_golden(str(path), latent_shape=(4, 16, 16), condition_size=5)
    path.write_bytes(b"PK pickle")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_golden(str(path), latent_shape=(4, 16, 16), condition_size=5)


def test_settings_that_do_not_fit_are_refused(hasty_config, tmp_path):
    with pytest.raises(InputError, match="`network` belongs to strategy golden"):
        altered(hasty_config, "noise={strategy: golden}")
    missing = altered(hasty_config, f"noise={{strategy: golden, network: {tmp_path}/none}}")
    with pytest.raises(InputError, match=r"noise\.network = .*none: there is no such file; "):
        check_models(missing)
