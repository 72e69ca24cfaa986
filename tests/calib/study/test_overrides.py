"""Settings laid over others."""

import pytest

from calib.study.overrides import merged
from data.errors import InputError


def test_mappings_are_merged_and_everything_else_is_replaced():
    base = {"optimiser": {"name": "sgd", "milestones": [80, 120]}, "epochs": 200, "mixed": None}
    over = {"optimiser": {"milestones": [5]}, "epochs": 10, "mixed": {"url": "there"}}
    assert merged(base, over) == {
        "optimiser": {"name": "sgd", "milestones": [5]},
        "epochs": 10,
        "mixed": {"url": "there"},
    }
    assert base["optimiser"] == {"name": "sgd", "milestones": [80, 120]}


def test_dotted_names_reach_inside_also_within_nested_settings():
    over = {"head.optimiser.factor": 0.5, "head": {"optimiser.name": "adam"}, "head.epochs": 3}
    assert merged({}, over) == {
        "head": {"optimiser": {"factor": 0.5, "name": "adam"}, "epochs": 3},
    }


@pytest.mark.parametrize(
    ("over", "result"),
    [
        ({"name": "focal", "gamma": 2}, {"name": "focal", "gamma": 2}),
        ({"name": "ls", "variant": "paper"}, {"name": "ls", "smoothing": 0.1, "variant": "paper"}),
        ({"smoothing": 0.2}, {"name": "ls", "smoothing": 0.2}),
    ],
)
def test_parameters_stay_only_with_a_part_of_the_same_name(over, result):
    assert merged({"loss": {"name": "ls", "smoothing": 0.1}}, {"loss": over})["loss"] == result


def test_keys_that_lead_nowhere_are_named():
    with pytest.raises(InputError, match=r"^overrides = 7: write settings as section\.key"):
        merged({}, {7: 1})
    with pytest.raises(InputError, match=r"^overrides = epochs\.x: epochs is a value"):
        merged({}, {"epochs": 3, "epochs.x": 1})
