"""Training with torch.compile: the same network, trained the same way; or a clear refusal."""

import pytest
import torch

from calib.loop import check_compiler
from data.errors import InputError


def test_without_a_compiler_it_is_refused_by_name(make_stage, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = r"^compile = True: needs the compiler no-such-compiler, which is not there; .* CXX,"
    with pytest.raises(InputError, match=text):
        make_stage("compile=true")
    monkeypatch.setenv("CC", "no-such-one")
    with pytest.raises(InputError, match=r"no-such-one, .* CC, or leave compile off$"):
        check_compiler(torch.device("cuda"))


@pytest.mark.slow
def test_a_compiled_network_trains_as_the_plain_one(make_stage):
    settings = ("loss={name: ce}", "model={name: lenet}", "ema=0.8", "select=nll")
    plain, compiled = make_stage(*settings), make_stage(*settings, "compile=true")
    for epoch in range(2):
        expected, found = plain.train_epoch(epoch), compiled.train_epoch(epoch)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert list(compiled.network.state_dict()) == list(plain.network.state_dict())
    assert list(compiled.kept.state_dict()) == list(plain.kept.state_dict())
