"""The grid of a study: what each cell is set to, and what is refused before anything runs."""

import pytest

from calib.study import cells_of, check_cells, choose
from data.errors import InputError

TWO = 'datasets={"small": {}, "smaller": {"overrides": {"real": {"train_per_class": 4}}}}'


def test_settings_of_a_cell_come_from_base_dataset_method_and_method_on_dataset(make_study):
    study = make_study(
        TWO,
        "datasets.small.overrides.epochs=5",
        "methods.ls.overrides.loss.smoothing=0.1",
        "methods.ls.overrides.epochs=6",
        "methods.ls.on={smaller: {loss.smoothing: 0.2}}",
    )
    cells = {cell.name: cell for cell in cells_of(study)}
    assert list(cells) == [f"{d}/{m}" for d in ("small", "smaller") for m in ("ce", "ls", "mac")]
    assert [cells[n].config.epochs for n in ("small/ce", "small/ls", "smaller/ce")] == [5, 6, 1]
    assert cells["small/ls"].config.loss.params == {"smoothing": 0.1}
    assert cells["smaller/ls"].config.loss.params == {"smoothing": 0.2}
    assert cells["smaller/ls"].config.real.train_per_class == 4
    assert cells["small/mac"].config.name == "CE + MaC-Cal"
    assert cells["small/ls"].config.name == "ls"
    assert {cell.config.seeds for cell in cells.values()} == {(0, 1, 2)}
    assert [cells[f"small/{m}"].stage for m in ("ce", "mac")] == ["base", "head"]


def test_only_methods_that_want_mixed_images_get_the_dataset_s(make_study):
    mixed = "datasets.digits.overrides.mixed={url: there, weight: 0.5}"
    study = make_study(mixed, "methods.ls.mixed=true", "methods.ls.overrides.mixed.weight=0.25")
    found = {cell.method: cell.config.mixed for cell in cells_of(study)}
    assert found["ce"] is found["mac"] is None
    assert (found["ls"].url, found["ls"].weight) == ("there", 0.25)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["baseline=cee"], r"^baseline = cee: choose one of ce, ls, mac"),
        (["methods.ls.name=CE"], r"^methods = CE: two rows have this name"),
        (["methods.ls.post_hoc={CE: scaled}"], r"^methods = CE: two rows have this name"),
        (["methods.ls.on={cifar: {}}"], r"^methods\.ls\.on = cifar: choose one of digits"),
        (
            ["methods.ls.overrides.epoch=3"],
            r"^digits/ls: epoch = as given: unknown setting; did you mean",
        ),
        (["base.epochs=0"], r"^digits/ce: epochs = 0: "),
        (["base.name=x"], r"^digits/ce: name = x: leave it out"),
        (["methods.ls.overrides.seeds=[5]"], r"^digits/ls: seeds = \[5\]: leave it out"),
        (["methods.ls.mixed=true"], r"^digits/ls: mixed = nothing: .*datasets\.digits\.overrides"),
        (
            ["methods.ls.overrides.evaluation.bins=10"],
            r"^digits/ls: evaluation\.bins = 10: digits/ce has 15; errors of different bins",
        ),
        (["methods.ls.overrides.mixed.url=x"], r"^digits/ls: mixed = as given: .*`mixed` to true"),
    ],
)
def test_what_makes_no_grid_is_named(make_study, overrides, message):
    with pytest.raises(InputError, match=message):
        cells_of(make_study(*overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['methods={"a/b": {}}'], r"^methods = .*'a/b' is a folder: letters"),
        (['methods={"..": {}}'], r"^methods = .*'\.\.' is a folder"),
        (["methods={CE: {}, ce: {}}"], r"^methods = .*upper and lower case alone"),
        (["datasets={}"], r"^datasets = "),
        (["seeds=[1, 1]"], r"^seeds = .*give each seed once"),
        (["methods.ls.post_hoc={x: platt}"], r"^methods\.ls\.post_hoc\.x = 'platt': "),
    ],
)
def test_settings_of_a_study_are_checked(make_study, overrides, message):
    with pytest.raises(InputError, match=message):
        make_study(*overrides)


def test_a_cell_that_cannot_be_trained_is_named_before_anything_runs(make_study):
    study = make_study("methods.ls.overrides.loss.name=lss")
    with pytest.raises(InputError, match=r"^digits/ls: loss\.name = lss: choose one of ce, "):
        check_cells(cells_of(study))
    check_cells(cells_of(make_study()))


def test_cells_are_chosen_by_name(make_study):
    cells = cells_of(make_study(TWO))
    assert [cell.name for cell in choose(cells, ["*/ce", "small/m*"])] == [
        "small/ce",
        "small/mac",
        "smaller/ce",
    ]
    assert choose(cells, []) == cells
    with pytest.raises(InputError, match=r"^--only = ce: no cell has this name; there are small/"):
        choose(cells, ["small/ce", "ce"])
