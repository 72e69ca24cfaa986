"""MaC-Cal: masks, inference, the sparsity rule, resuming; TST and VTST by hand."""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from semix.calib.config import MaCCalConfig, TSTConfig
from semix.calib.config.loss import CrossEntropyConfig
from semix.calib.heads import (
    MaskedBottleneckHead,
    SparsityController,
    TSTHead,
    VTSTHead,
    build_head,
    kl_divergence,
)
from semix.calib.losses.base import CrossEntropy
from semix.calib.stage_two import VariationalObjective
from semix.data.errors import InputError
from semix.data.settings import load_settings


def features_and_targets(seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(64, 24, generator=rng), torch.randint(4, (64,), generator=rng)


def head(**params: object) -> MaskedBottleneckHead:
    torch.manual_seed(0)
    return MaskedBottleneckHead(24, 4, load_settings(MaCCalConfig, params))


def optimiser_for(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-2)


def train_epoch(
    head: MaskedBottleneckHead, optimiser: torch.optim.Optimizer, *, steps: int = 3
) -> Iterator[float]:
    """Yield the loss after each step."""
    features, targets = features_and_targets()
    head.train()
    for _ in range(steps):
        optimiser.zero_grad()
        loss = functional.cross_entropy(head(features), targets)
        loss.backward()
        head.after_backward()
        optimiser.step()
        head.after_step()
        yield loss.item()


def masked_weights(head: MaskedBottleneckHead) -> tuple[Tensor, Tensor]:
    return head.layer1.weight[~head.mask1], head.layer2.weight[~head.mask2]


def test_sizes_and_start():
    module = MaskedBottleneckHead(2048, 10, MaCCalConfig())
    assert (module.layer1.out_features, module.layer2.out_features) == (512, 10)
    assert MaskedBottleneckHead(640, 100, MaCCalConfig()).layer1.out_features == 200
    assert MaskedBottleneckHead(640, 100, MaCCalConfig(hidden=7)).layer1.out_features == 7
    assert module.mask1.all()
    assert module.mask2.all()
    deviation = (2 / 2048) ** 0.5  # Kaiming
    torch.testing.assert_close(module.layer1.weight.std().item(), deviation, rtol=0.01, atol=0)
    torch.testing.assert_close(module.layer1.bias, torch.zeros(512))


@pytest.mark.parametrize("inference", ["last", "expected"])
def test_masked_training_forward_by_hand(inference: str):
    settings = MaCCalConfig(hidden=2, mask_mode="preserve", inference=inference)
    module = MaskedBottleneckHead(2, 2, settings)
    with torch.no_grad():
        module.layer1.weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 1.0]]))
        module.layer2.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
        module.layer2.bias.copy_(torch.tensor([0.5, 0.0]))
        module.mask1.copy_(torch.tensor([[True, False], [True, True]]))
        module.mask2.copy_(torch.tensor([[True, True], [True, False]]))
    # Hidden units: 1 and relu(-1 + 3) = 2. Logits: 1 + 2 + 0.5 and 0.
    got = module(torch.tensor([[1.0, 3.0]]))
    torch.testing.assert_close(got, torch.tensor([[3.5, 0.0]]))


def test_masks_are_drawn_at_the_rate_and_from_the_generator_alone():
    module = MaskedBottleneckHead(400, 10, MaCCalConfig(hidden=100))
    module.start_epoch(0.3, torch.Generator().manual_seed(5))
    first = module.mask1.clone()
    assert first.float().mean().item() == pytest.approx(0.3, abs=0.01)  # 4 deviations
    torch.manual_seed(99)
    module.start_epoch(0.3, torch.Generator().manual_seed(5))
    assert torch.equal(module.mask1, first)
    rng = torch.Generator().manual_seed(5)
    module.start_epoch(0.3, rng)
    module.start_epoch(0.3, rng)
    assert not torch.equal(module.mask1, first)
    module.start_epoch(1.0, rng)
    assert module.mask1.all()


def test_reset_weights_are_zero_after_every_step_with_momentum_and_decay():
    module, rng = head(), torch.Generator().manual_seed(0)
    optimiser = optimiser_for(module)
    for p in (1.0, 0.5, 0.7, 0.2):  # momentum builds up, then its weights are masked
        module.start_epoch(p, rng)
        for _ in train_epoch(module, optimiser):
            for weight in masked_weights(module):
                torch.testing.assert_close(weight, torch.zeros_like(weight), rtol=0, atol=0)
    assert (~module.mask1).any()
    assert (~module.mask2).any()


def test_a_reset_weight_restarts_from_zero_when_it_is_kept_again():
    module = head()
    before = module.layer1.weight.detach().clone()
    module.start_epoch(0.5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(module.layer1.weight, before * module.mask1)
    lost = ~module.mask1
    module.start_epoch(1.0, torch.Generator())
    assert (module.layer1.weight[lost] == 0).all()


def test_masked_weights_get_no_gradient_and_kept_ones_do():
    for mode in ("reset", "preserve"):
        module = head(mask_mode=mode)
        module.start_epoch(0.5, torch.Generator().manual_seed(0))
        features, targets = features_and_targets()
        functional.cross_entropy(module(features), targets).backward()
        module.after_backward()
        for layer, mask in ((module.layer1, module.mask1), (module.layer2, module.mask2)):
            assert (layer.weight.grad[~mask] == 0).all()
            assert (layer.weight.grad[mask] != 0).any()
            assert layer.bias.grad.abs().sum() > 0


def test_preserved_weights_keep_their_value_without_momentum_and_decay():
    module = head(mask_mode="preserve")
    before = module.layer1.weight.detach().clone()
    module.start_epoch(0.5, torch.Generator().manual_seed(0))
    list(train_epoch(module, torch.optim.SGD(module.parameters(), lr=0.1)))
    masked = ~module.mask1
    torch.testing.assert_close(module.layer1.weight[masked], before[masked], rtol=0, atol=0)
    assert (module.layer1.weight[~masked] != before[~masked]).any()


@pytest.mark.parametrize(
    ("params", "weight"),
    [
        ({}, lambda w, m: w),  # sparse as it is
        ({"mask_mode": "preserve", "inference": "last"}, lambda w, m: w * m),
        ({"mask_mode": "preserve", "inference": "expected"}, lambda w, m: w * 0.4),
        (
            {"mask_mode": "preserve", "inference": "dense", "allow_unscaled": True},
            lambda w, m: w,
        ),
    ],
)
def test_inference_uses_the_stated_weights_and_is_deterministic(params: dict, weight: object):
    module = head(**params)
    module.start_epoch(0.4, torch.Generator().manual_seed(0))
    list(train_epoch(module, optimiser_for(module)))
    module.eval()
    features, _ = features_and_targets(1)
    first = weight(module.layer1.weight, module.mask1)  # type: ignore[operator]
    second = weight(module.layer2.weight, module.mask2)  # type: ignore[operator]
    hidden = functional.linear(features, first, module.layer1.bias).relu()
    expected = functional.linear(hidden, second, module.layer2.bias)
    state = torch.get_rng_state()
    torch.testing.assert_close(module(features), expected)
    torch.testing.assert_close(module(features), module(features), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_masked_training_still_learns():
    module = head(hidden=64)
    module.start_epoch(0.5, torch.Generator().manual_seed(0))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = list(train_epoch(module, optimiser, steps=200))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("p", [0.0, 1.1, math.nan])
def test_a_fraction_outside_its_range_is_refused(p: float):
    with pytest.raises(ValueError, match=r"p = .*must lie in \(0, 1\]"):
        head().start_epoch(p, torch.Generator())


def controller(**params: object) -> SparsityController:
    of_stage_one = {"base_accuracy": 0.9, "chance": 0.1}
    of_stage_one |= {name: params.pop(name) for name in (*of_stage_one, "seed") if name in params}
    return SparsityController(load_settings(MaCCalConfig, params), **of_stage_one)


def test_delta_decays_from_its_largest_to_its_smallest():
    rule = controller(epochs=2, delta_max=0.1, delta_min=0.001)
    deltas = [rule.delta(e) for e in range(3)]
    assert deltas == pytest.approx([0.1, 0.01, 0.001])


@pytest.mark.parametrize(
    ("accuracy", "confidence", "expected"),
    [
        (1.0, 0.94, 0.46),  # 0.9 - 0.94 = -0.04, over-confident: p falls
        (1.0, 0.88, 0.52),  # under-confident: p rises
        (1.0, 1.0, 0.4),  # the step is -0.1 at most
        (1.0, 0.2, 0.6),
        (0.84, 0.99, 0.5),  # 6 points below stage one: p does not fall
        (0.84, 0.7, 0.556),  # but rises
        (0.86, 0.8, 0.474),  # 4 points below: it falls
    ],
)
def test_p_by_hand(accuracy: float, confidence: float, expected: float):
    got = controller(gamma=0.9).end_epoch(accuracy=accuracy, confidence=confidence)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.17, 0.17), 0.5),  # a tenth of the way from 0.1 to 0.9 is 0.18
        ((0.17, 0.17, 0.17), 0.6),
        ((0.17, 0.19, 0.17), 0.5),
        ((0.6, 0.17, 0.17, 0.17), 0.6),  # the last three
        ((0.7, 0.6, 0.49), 0.5),
        ((0.8, 0.7, 0.6, 0.49), 0.6),  # half of the way is 0.5
        ((0.8, 0.7, 0.6, 0.51), 0.5),
        ((0.7, 0.7, 0.6, 0.49), 0.5),
        ((0.6, 0.7, 0.6, 0.49), 0.5),
    ],
)
def test_p_rises_where_accuracy_is_at_chance_or_falls_on_towards_it(
    accuracies: tuple[float, ...], expected: float
):
    rule = controller()
    for accuracy in accuracies:
        rule.end_epoch(accuracy=accuracy, confidence=0.95)  # over-confident: else p would stay
    assert rule.p == pytest.approx(expected)  # by delta_max, not by the delta of a later epoch


def test_what_stage_one_has_not_learnt_is_not_lost():
    for base, expected in ((0.14, False), (0.3, True)):
        rule = controller(base_accuracy=base)
        for _ in range(3):
            rule.end_epoch(accuracy=0.1, confidence=0.1)
        assert rule.at_chance() == expected


def test_p_stays_between_its_floor_and_one():
    falling, rising = controller(p_start=0.15), controller(p_start=0.95)
    for _ in range(40):
        falling.end_epoch(accuracy=1.0, confidence=1.0)
        rising.end_epoch(accuracy=1.0, confidence=0.3)
        assert 0.1 <= falling.p <= 1
        assert 0.1 <= rising.p <= 1
    assert (falling.p, rising.p) == (0.1, 1.0)
    for line, after in zip(falling.history, falling.history[1:], strict=False):
        assert line["p"] - after["p"] <= line["delta"] + 1e-12


def test_history_tells_each_epoch():
    rule = controller(epochs=2)
    rule.end_epoch(accuracy=1.0, confidence=0.94)
    rule.end_epoch(accuracy=0.95, confidence=0.9)
    assert rule.history[0] == {
        "epoch": 0,
        "p": 0.5,
        "delta": 0.1,
        "accuracy": 1.0,
        "confidence": 0.94,
    }
    assert rule.history[1]["p"] == pytest.approx(0.46)
    assert rule.history[1]["epoch"] == 1
    with pytest.raises(ValueError, match=r"epoch = 2: all 2 epochs are done"):
        rule.end_epoch(accuracy=1.0, confidence=1.0)


def test_percent_is_refused():
    with pytest.raises(ValueError, match=r"base_accuracy = 93\.0: give a fraction"):
        controller(base_accuracy=93.0)
    with pytest.raises(ValueError, match=r"accuracy = 95\.0: give a fraction"):
        controller().end_epoch(accuracy=95.0, confidence=0.5)


def run_epoch(
    head: MaskedBottleneckHead, rule: SparsityController, optimiser: torch.optim.Optimizer
) -> None:
    head.start_epoch(rule.p, rule.generator)
    list(train_epoch(head, optimiser))
    probabilities = head(features_and_targets()[0]).softmax(1)
    right = probabilities.argmax(1) == features_and_targets()[1]
    rule.end_epoch(
        accuracy=right.float().mean().item(), confidence=probabilities.amax(1).mean().item()
    )


def test_a_restored_run_equals_an_unbroken_one():
    module, rule = head(), controller(epochs=4, base_accuracy=0.5)
    optimiser = optimiser_for(module)
    for epoch in range(4):
        if epoch == 2:
            components = (module, rule, optimiser)
            saved = copy.deepcopy([component.state_dict() for component in components])
        run_epoch(module, rule, optimiser)

    torch.manual_seed(7)
    again, rule_again = (
        MaskedBottleneckHead(24, 4, MaCCalConfig()),
        controller(epochs=4, base_accuracy=0.5, seed=3),
    )
    optimiser_again = optimiser_for(again)
    for component, state in zip((again, rule_again, optimiser_again), saved, strict=True):
        component.load_state_dict(state)
    for _ in range(2):
        run_epoch(again, rule_again, optimiser_again)
    torch.testing.assert_close(dict(again.state_dict()), dict(module.state_dict()), rtol=0, atol=0)
    assert rule_again.history == rule.history
    assert rule_again.p == rule.p
    assert torch.equal(rule_again.generator.get_state(), rule.generator.get_state())


def set_linear(layer: nn.Module, weight: list, bias: list) -> None:
    layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})


def test_tst_by_hand():
    module = TSTHead(2, 2, TSTConfig(method="tst", latent=1))  # 2 -> 3 -> 1 -> 2
    set_linear(module.encoder[0], [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], [0.0, 0.5, 0.0])
    set_linear(module.encoder[2], [[1.0, 2.0, 4.0]], [-10.0])
    set_linear(module.classifier, [[1.0], [3.0]], [0.0, 1.0])
    # Hidden units of (2, 1): 2, 1.5 and relu(-2) = 0. Latent 2 + 3 - 10 = -5, not rectified.
    torch.testing.assert_close(module(torch.tensor([[2.0, 1.0]])), torch.tensor([[-5.0, -14.0]]))


def test_heads_by_their_settings():
    tst = build_head(TSTConfig(method="tst", latent=7), 640, 100)
    shapes = [tuple(p.shape) for p in tst.parameters() if p.ndim == 2]
    assert shapes == [(21, 640), (7, 21), (100, 7)]
    vtst = build_head(TSTConfig(method="vtst", latent=7, samples=4), 640, 100)
    shapes = [tuple(p.shape) for p in vtst.parameters() if p.ndim == 2]
    assert shapes == [(21, 640), (7, 21), (21, 640), (7, 21), (100, 7)]
    assert vtst.noise.shape == (4, 1, 7)
    masked = build_head(MaCCalConfig(hidden=5, mask_mode="preserve", inference="expected"), 24, 4)
    assert masked.layer1.weight.shape == (5, 24)
    assert (masked.mask_mode, masked.inference) == ("preserve", "expected")


def vtst(**params: int) -> VTSTHead:
    torch.manual_seed(0)
    return VTSTHead(24, 4, load_settings(TSTConfig, {"method": "vtst", **params}))


def test_vtst_draws_by_hand():
    module = VTSTHead(1, 2, TSTConfig(method="vtst", latent=1, samples=2))
    for branch, bias in ((module.mean, 3.0), (module.log_variance, 0.0)):
        for parameter in branch.parameters():
            nn.init.zeros_(parameter)
        nn.init.constant_(branch[2].bias, bias)
    set_linear(module.classifier, [[1.0], [0.0]], [0.0, 0.0])
    module.noise.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1))
    # Log sigmoid of 0 is log 1/2: the deviation is sqrt 1/2, the latents are 3 + and - that.
    deviation = math.sqrt(0.5)
    p = [1 / (1 + math.exp(-(3 + sign * deviation))) for sign in (1, -1)]
    expected = torch.tensor([[sum(p) / 2, 1 - sum(p) / 2]])
    output = module.eval()(torch.ones(1, 1))
    torch.testing.assert_close(output.exp(), expected)
    torch.testing.assert_close(output.logsumexp(1), torch.zeros(1), rtol=0, atol=1e-6)
    torch.manual_seed(5)
    noise = torch.randn(1, 1)
    torch.manual_seed(5)
    logits = module.train()(torch.ones(1, 1))
    torch.testing.assert_close(logits[0, 0], 3 + deviation * noise[0, 0])


def test_vtst_predicts_a_sample_alike_in_any_company_and_draws_only_in_training():
    module, (features, _) = vtst().eval(), features_and_targets()
    state = torch.get_rng_state()
    expected = module(features)
    torch.testing.assert_close(module(features[5:8]), expected[5:8])
    torch.testing.assert_close(module(features), expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    module.train()
    assert (module(features) - module(features)).abs().max() > 0.01
    restored = vtst()  # other noise, until it is loaded
    restored.load_state_dict(module.state_dict())
    torch.testing.assert_close(restored.eval()(features), expected, rtol=0, atol=0)


def test_vtst_variance_lies_below_one():
    features = 50 * features_and_targets()[0]
    _, log_variance = vtst().encode(features)
    assert log_variance.max() <= 0
    assert log_variance.shape == (64, 10)


def test_divergence_from_a_standard_normal():
    torch.testing.assert_close(
        kl_divergence(torch.zeros(3, 2), torch.zeros(3, 2)), torch.tensor(0.0)
    )
    # A mean of (2, 0): 4 / 2 over two dimensions, in one of two samples.
    mean = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(kl_divergence(mean, torch.zeros(2, 2)), torch.tensor(0.5))
    rng = torch.Generator().manual_seed(0)
    mean, log_variance = torch.randn(5, 3, generator=rng), torch.randn(5, 3, generator=rng)
    normal = torch.distributions.Normal(mean, (log_variance / 2).exp())
    expected = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(kl_divergence(mean, log_variance), expected.sum(1).mean() / 3)


def test_vtst_trains_by_one_draw_and_the_divergence():
    module, (features, targets) = vtst(), features_and_targets()
    objective = VariationalObjective(module, CrossEntropy(4, CrossEntropyConfig())).train()
    torch.manual_seed(3)
    expected = module.train()(features)
    torch.manual_seed(3)
    loss, logits = objective(features, targets, torch.arange(64))
    torch.testing.assert_close(logits, expected)
    likelihood = functional.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, likelihood + kl_divergence(*module.encode(features)))
    loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        (head, {"mask_mode": "drop"}, r"^mask_mode = 'drop': choose one of reset, preserve"),
        (head, {"inference": "mean"}, r"^inference = 'mean': choose one of last, expected, d"),
        (
            head,
            {"inference": "expected"},
            r"^config: `inference` is expected: reset weights",
        ),
        (
            head,
            {"mask_mode": "preserve", "inference": "dense"},
            r"^config: `inference` is dense: .* or set `allow_unscaled`",
        ),
        (head, {"hidden": 0}, r"^hidden = 0: input should be greater than or equal to 1"),
        (controller, {"epochs": 0}, r"^epochs = 0: input should be greater than or equal to 1"),
        (controller, {"p_min": 0.0}, r"^p_min = 0\.0: input should be greater than 0"),
        (controller, {"p_start": 0.05}, r"^config: `p_min` is 0\.1, above `p_start`, 0\.05"),
        (controller, {"gamma": 1.2}, r"^gamma = 1\.2: input should be less than or equal to 1"),
        (controller, {"delta_max": 0}, r"^delta_max = 0: input should be greater than 0"),
        (controller, {"delta_min": 0.2}, r"^config: `delta_min` is 0\.2, above `delta_max`, 0\.1"),
        (vtst, {"latent": 0}, r"^latent = 0: input should be greater than or equal to 1"),
        (vtst, {"latent": 1.5}, r"^latent = 1\.5: input should be a valid integer"),
        (vtst, {"samples": 0}, r"^samples = 0: input should be greater than or equal to 1"),
    ],
)
def test_bad_settings_are_named(kind: Callable, params: dict, text: str):
    with pytest.raises(InputError, match=text):
        kind(**params)
