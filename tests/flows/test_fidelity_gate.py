"""Real builds with approximate images: through the gate, or stopped by it."""

import json

import pytest

from data.errors import InputError
from data.root import FIDELITY, Root
from flows.build import build, resume


@pytest.fixture
def config_of(make_config, hasty_standins):
    """config_of(**approximate): ten pairs of digits, one series each, of four images."""

    def make(**approximate: object):
        few = "mixing.pairs={kind: sampled, count: 10}"
        options = [f"generator.approximate.{key}={value}" for key, value in approximate.items()]
        return make_config(hasty_standins, few, "generator.steps=6", *options)

    return make


def test_a_build_that_changes_nothing_passes_the_gate(prefect_api, config_of, tmp_path):
    root = build(config_of(guidance_interval="[0,1]"), str(tmp_path / "mixed"), slots=1)
    assert root.missing() == []
    verdict = json.loads(root.store.get(FIDELITY))
    assert (verdict["passed"], verdict["groups"]) == (True, 10)


def test_a_gross_approximation_stops_before_the_first_shard(prefect_api, config_of, tmp_path):
    place = str(tmp_path / "mixed")
    message = r"generator\.approximate = steps 1: the images fail the fidelity gate on 10 series"
    with pytest.raises(InputError, match=message):
        build(config_of(steps=1), place, slots=1)
    root = Root(place)
    assert root.committed() == {}
    # Going on is refused as well, by what was measured.
    before = root.store.get(FIDELITY)
    with pytest.raises(InputError, match=message):
        resume(root, slots=1)
    assert root.committed() == {}
    assert root.store.get(FIDELITY) == before
