"""Networks: batch norms while mixed images pass, outputs of whole splits, predictions in chunks."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from semix.calib.check import check_config
from semix.calib.checkpoint import load_exactly, save_tensors
from semix.calib.network import (
    Network,
    apply_batch_norm_policy,
    apply_in_chunks,
    load_trained,
    mixed_pass,
)
from semix.calib.real_data import open_data
from semix.calib.real_images import decode
from semix.calib.run_folder import DATA, claim_run, seed_folder
from semix.calib.stage_one import BaseStage
from semix.data.errors import InputError
from semix.data.files import write_json

REAL = torch.tensor([[0.0], [2.0]])  # mean 1, unbiased variance 2
MIXED = torch.tensor([[10.0], [14.0]])  # mean 12, unbiased variance 8
POLICIES = ("shared", "eval_on_mixed", "separate")


def one_norm(policy: str) -> nn.Sequential:
    """A batch norm of one number, which forgets half at each batch."""
    network = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5, eps=1e-9))
    apply_batch_norm_policy(network, policy)
    return network


def both_passes(network: nn.Module, policy: str) -> torch.Tensor:
    network(REAL)
    with mixed_pass(network, policy):
        return network(MIXED)


def statistics(norm: nn.Module) -> list[float]:
    return [norm.running_mean.item(), norm.running_var.item(), norm.num_batches_tracked.item()]


def test_shared_statistics_are_of_both_passes():
    network = one_norm("shared")
    output = both_passes(network, "shared")
    torch.testing.assert_close(output, torch.tensor([[-1.0], [1.0]]))
    assert statistics(network[0]) == [0.5 * 0.5 + 0.5 * 12, 0.5 * 1.5 + 0.5 * 8, 2]


def test_evaluated_on_mixed_images_they_are_of_real_ones_alone():
    network = one_norm("eval_on_mixed")
    output = both_passes(network, "eval_on_mixed")
    # Running mean 0.5 and variance 1.5, after the real pass.
    torch.testing.assert_close(output, (MIXED - 0.5) / 1.5**0.5)
    assert statistics(network[0]) == [0.5, 1.5, 1]
    assert network[0].training


def test_gradients_flow_through_norms_that_are_evaluated():
    network = one_norm("eval_on_mixed")
    both_passes(network, "eval_on_mixed").sum().backward()
    torch.testing.assert_close(network[0].weight.grad, ((MIXED - 0.5) / 1.5**0.5).sum(0))
    assert network[0].bias.grad.item() == 2


def test_norms_that_were_frozen_stay_frozen():
    network = one_norm("eval_on_mixed").append(nn.BatchNorm1d(1))
    network[1].eval()
    both_passes(network, "eval_on_mixed")
    assert [norm.training for norm in network] == [True, False]


def test_separate_norms_keep_two_sets_of_statistics_and_weights():
    network = one_norm("separate")
    output = both_passes(network, "separate")
    torch.testing.assert_close(output, torch.tensor([[-1.0], [1.0]]))
    assert statistics(network[0]) == [0.5, 1.5, 1]
    assert statistics(network[0].mixed) == [6, 4.5, 1]
    (3 * output[1]).sum().backward()
    assert network[0].weight.grad is None
    assert network[0].mixed.bias.grad.item() == 3
    network.eval()
    torch.testing.assert_close(network(MIXED), (MIXED - 0.5) / 1.5**0.5)  # by the real images' norm


def test_an_error_inside_ends_the_pass():
    for policy in POLICIES:
        network = one_norm(policy)
        with pytest.raises(ZeroDivisionError), mixed_pass(network, policy):
            raise ZeroDivisionError
        network(REAL)
        assert statistics(network[0]) == [0.5, 1.5, 1]


def test_shared_and_evaluated_networks_have_the_state_they_have_without():
    plain = list(nn.BatchNorm1d(1).state_dict())
    for policy in ("shared", "eval_on_mixed"):
        assert list(one_norm(policy)[0].state_dict()) == plain
    separate = one_norm("separate")[0].state_dict()
    assert list(separate) == [*plain, *(f"mixed.{name}" for name in plain)]


def test_separate_norms_come_in_every_kind():
    network = nn.Sequential(nn.BatchNorm2d(2), BatchNormAct2d(2), nn.SyncBatchNorm(2))
    apply_batch_norm_policy(network, "separate")
    images = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    for norm in network[:2]:
        with mixed_pass(network, "separate"):
            norm(images)
        norm(-images)
        torch.testing.assert_close(norm.running_mean, -norm.mixed.running_mean)
    assert network[1](images).min() == 0  # its activation is still there
    assert isinstance(network[2], nn.SyncBatchNorm)


def train_two_steps(make_config, policy: str, wrap) -> Network:
    """A network after two steps of real and mixed images through `wrap(network)`."""
    torch.manual_seed(0)
    config = make_config(f"mixed.batch_norm={policy}")
    network = Network(config, 10).train()
    wrapped, generator = wrap(network), torch.Generator().manual_seed(1)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        real, mixed = torch.randint(256, (2, 6, 8, 8, 3), generator=generator).to(torch.uint8)
        loss = wrapped(real)[0].square().mean()
        with mixed_pass(wrapped, policy):
            loss = loss + (wrapped(mixed)[0] - 1).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return network


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_network_learns_the_same(make_config, policy):
    torch.compiler.reset()
    states = [
        train_two_steps(make_config, policy, wrap).state_dict()
        for wrap in (lambda network: network, lambda n: torch.compile(n, backend="eager"))
    ]
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_distributed_training_uses_every_parameter_in_every_step(make_config, policy, tmp_path):
    """Distributed training refuses the second step if the first left a parameter out."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1
    )
    try:
        state = train_two_steps(make_config, policy, DistributedDataParallel).state_dict()
    finally:
        torch.distributed.destroy_process_group()
    alone = train_two_steps(make_config, policy, lambda network: network).state_dict()
    torch.testing.assert_close(state, alone, rtol=1e-5, atol=1e-6)


def test_a_trained_network_is_saved_and_loaded_with_both_sets(make_config, tmp_path):
    run = claim_run(make_config("mixed.batch_norm=separate", "head=null"), tmp_path / "run").parent
    network = train_two_steps(make_config, "separate", lambda network: network)
    seed_folder(run, 0).mkdir()
    write_json(run / DATA, {"real": "1" * 64, "class_names": list("abcdefghij"), "mixed": None})
    save_tensors(seed_folder(run, 0) / "model.safetensors", network.state_dict())
    loaded = load_trained(run, 0)
    torch.testing.assert_close(loaded.network.state_dict(), network.state_dict())
    images = torch.arange(4 * 8 * 8 * 3).view(4, 8, 8, 3).to(torch.uint8)
    torch.testing.assert_close(loaded(images), network.eval()(images)[0])
    plain = Network(make_config(), 10)
    with pytest.raises(InputError, match=r"\.mixed\.\w+ = .*the model has none"):
        load_exactly(plain, seed_folder(run, 0) / "model.safetensors")


@pytest.mark.parametrize("policy", ["eval_on_mixed", "separate"])
def test_a_model_without_batch_norms_is_refused_before_anything_is_read(make_config, policy):
    model = "model={name: lenet}"
    check_config(make_config(model))
    message = rf"^mixed\.batch_norm = {policy}: the model has no batch norms"
    with pytest.raises(InputError, match=message):
        check_config(make_config(model, f"mixed.batch_norm={policy}"))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_outputs_are_those_of_eval_mode_on_images_as_they_are(make_stage, split):
    stage = make_stage()
    stage.network.train()
    outputs = stage.split_outputs.outputs(split)
    assert stage.network.training
    real = getattr(open_data(stage.config).real, split)
    with torch.no_grad():
        logits, features = stage.network.eval()(decode(real))
    torch.testing.assert_close(outputs.logits, logits)
    torch.testing.assert_close(outputs.features, features)
    torch.testing.assert_close(outputs.targets, torch.from_numpy(real.targets))


def test_it_runs_once_until_the_network_has_changed(make_stage):
    stage = make_stage()
    passes = []
    stage.network.register_forward_hook(lambda *_: passes.append(1))
    first = stage.split_outputs.outputs("validation")
    assert stage.split_outputs.outputs("validation") is first
    assert len(passes) == 1
    stage.split_outputs.clear_cache()
    stage.split_outputs.outputs("validation")
    assert len(passes) == 2


def test_outputs_are_float32_whatever_trains(make_config, bf16_stage):
    bf16_stage.train_epoch(0)
    outputs = bf16_stage.split_outputs.outputs("validation")
    with torch.no_grad():
        images = decode(open_data(bf16_stage.config).real.validation)
        logits = type(bf16_stage.network).forward(bf16_stage.network.eval(), images)[0]
    torch.testing.assert_close(outputs.logits, logits, rtol=1e-5, atol=1e-5)


def test_their_float32_is_never_tf32(make_stage, precisions):
    make_stage().split_outputs.outputs("validation")
    assert precisions == {"ieee"}


@pytest.fixture
def bf16_stage(make_config):
    AcceleratorState._reset_state(reset_partial_state=True)
    config = make_config("mixed_precision=bf16")
    yield BaseStage(
        config, open_data(config), seed=0, accelerator=Accelerator(mixed_precision="bf16")
    )
    AcceleratorState._reset_state(reset_partial_state=True)


def test_chunks_come_back_in_order_without_gradients():
    rows = torch.arange(1201.0, requires_grad=True)
    output = apply_in_chunks(lambda chunk: chunk * 2, rows)
    torch.testing.assert_close(output, torch.arange(1201.0) * 2)
    assert not output.requires_grad
