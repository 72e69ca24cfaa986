"""Outputs of whole splits: as the network says in eval mode, once until it changes."""

import pytest
import torch

from calib.real_data import open_data
from calib.real_images import decode


@pytest.mark.parametrize("split", ["train", "validation"])
def test_outputs_are_those_of_eval_mode_on_images_as_they_are(make_stage, split):
    stage = make_stage()
    stage.network.train()
    found = stage.feedback.outputs(split)
    assert stage.network.training
    real = getattr(open_data(stage.config).real, split)
    with torch.no_grad():
        logits, features = stage.network.eval()(decode(real))
    torch.testing.assert_close(found.logits, logits)
    torch.testing.assert_close(found.features, features)
    torch.testing.assert_close(found.targets, torch.from_numpy(real.targets))


def test_it_runs_once_until_the_network_has_changed(make_stage):
    stage = make_stage()
    passes = []
    stage.network.register_forward_hook(lambda *_: passes.append(1))
    first = stage.feedback.outputs("validation")
    assert stage.feedback.outputs("validation") is first
    assert len(passes) == 1
    stage.feedback.forget()
    stage.feedback.outputs("validation")
    assert len(passes) == 2


def test_outputs_are_float32_whatever_trains(make_config, bf16_stage):
    bf16_stage.train_epoch(0)
    found = bf16_stage.feedback.outputs("validation")
    with torch.no_grad():
        images = decode(open_data(bf16_stage.config).real.validation)
        logits = type(bf16_stage.network).forward(bf16_stage.network.eval(), images)[0]
    torch.testing.assert_close(found.logits, logits, rtol=1e-5, atol=1e-5)


def test_their_float32_is_never_tf32(make_stage, precisions):
    make_stage().feedback.outputs("validation")
    assert precisions == {"ieee"}


@pytest.fixture
def bf16_stage(make_config):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from calib.stage_one import BaseStage

    AcceleratorState._reset_state(reset_partial_state=True)
    config = make_config("mixed_precision=bf16")
    yield BaseStage(
        config, open_data(config), seed=0, accelerator=Accelerator(mixed_precision="bf16")
    )
    AcceleratorState._reset_state(reset_partial_state=True)
