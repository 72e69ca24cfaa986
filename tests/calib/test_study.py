"""A study as a grid: settings of each cell, errors, first stages that are shared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from semix.calib.config import TrainConfig
from semix.calib.run_folder import claim_run
from semix.calib.study import StudyConfig, cells_of, check_cells, merged, rows_of, select_cells
from semix.calib.study_jobs import Job, copy_first_stage, plan_jobs
from semix.calib.train import train_run
from semix.data.errors import InputError
from semix.data.settings import load_settings
from tests.calib.measured import STUDY

CONFIGS = Path(__file__).parents[2] / "configs"
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
    settings = {cell.method: cell.config.mixed for cell in cells_of(study)}
    assert settings["ce"] is settings["mac"] is None
    assert (settings["ls"].url, settings["ls"].weight) == ("there", 0.25)


BUILDS = "builds={random: {mixing: {groups_per_pair: 1}}}"
REPLICATED = [
    "splits=[3, 4]",
    "draws=[7, 8]",
    "standins=true",
    BUILDS,
    "methods.ls.mixed=random",
    "methods.ls.name=CSM",
    "methods.ls.grid={w: {w 1: {mixed.weight: 1}, 'w 2.5': {mixed.weight: 2.5}},"
    " labels: {CLIP: {}, hard: {mixed.scale: 20}}}",
]


def test_replicates_are_splits_and_for_mixed_images_their_draws(make_study, tmp_path):
    cells = cells_of(make_study(*REPLICATED), tmp_path)
    points = [f"{w}+{labels}" for w in ("w-1", "w-2-5") for labels in ("CLIP", "hard")]
    assert [cell.name for cell in cells if cell.split == 3] == [
        "digits-split3/ce",
        *(f"digits-split3-draw{draw}/ls+{point}" for draw in (7, 8) for point in points),
        "digits-split3/mac",
    ]
    assert {c.config.real.split_seed for c in cells if c.replicate == "digits-split4"} == {4}
    last = cells[-2]
    assert (last.name, last.build, last.draw) == ("digits-split4-draw8/ls+w-2-5+hard", "random", 8)
    assert last.config.name == "CSM (w 2.5, hard)"
    assert (last.config.mixed.weight, last.config.mixed.scale) == (2.5, 20)
    assert last.config.mixed.url == str(tmp_path / "mixed" / "digits-split4-draw8-random")
    check_cells(cells)  # before there is any mixed dataset


def test_rows_are_points_of_the_grid_then_what_is_chosen_of_them(make_study):
    study = make_study(*REPLICATED, "methods.ls.chosen={best: {by: ece}, soft: {match: best}}")
    labels = [row.label for row in rows_of(study)]
    points = [f"CSM ({w}, {labels})" for w in ("w 1", "w 2.5") for labels in ("CLIP", "hard")]
    assert labels == ["CE", *points, "best", "soft", "CE + MaC-Cal"]
    assert len(rows_of(study)[5].points) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["methods.ls.mixed=other", BUILDS],
            r"^methods\.ls\.mixed = other: .* choose one of random",
        ),
        (["methods.ls.mixed=other"], r"^methods\.ls\.mixed = other: a key of `builds`; it has"),
        (["draws=[0, 1]"], r"`draws` and `standins` need mixed datasets"),
        (["methods.ce.grid={a: {b: {}}}"], r"^baseline = ce: has a grid"),
        (
            ["methods.ls.grid={a: {x y: {}, x-y: {}}}"],
            r"^methods = ls \(x-y\): two combinations would share a folder",
        ),
        (
            ["methods.ls.grid={a: {b: {}}}", "methods.ls.chosen={best: {match: CE + MaC-Cal}}"],
            r"chosen\.best\.match = CE \+ MaC-Cal: name an earlier row: CE, ls \(b\)$",
        ),
        (['contrasts=[["ls", "LS"]]'], r"^contrasts = LS: .*choose from CE, ls,"),
        (["baseline=cee"], r"^baseline = cee: choose one of ce, ls, mac"),
        (["methods.ls.name=CE"], r"^methods = CE: two rows have this name"),
        (["methods.ls.post_hoc={CE: scaled}"], r"^methods = CE: two rows have this name"),
        (["methods.ls.on={cifar: {}}"], r"^methods\.ls\.on = cifar: choose one of digits"),
        (
            ["methods.ls.overrides.epoch=3"],
            r"^digits/ls: epoch: unknown setting; did you mean",
        ),
        (["base.epochs=0"], r"^digits/ce: epochs = 0: "),
        (["base.name=x"], r"^digits/ce: name = x: leave it out"),
        (["methods.ls.overrides.seeds=[5]"], r"^digits/ls: seeds = \[5\]: leave it out"),
        (["methods.ls.mixed=true"], r"^digits/ls: mixed = nothing: .*datasets\.digits\.overrides"),
        (
            ["methods.ls.overrides.evaluation.bins=10"],
            r"^digits/ls: evaluation\.bins = 10: digits/ce has 15; errors of different bins",
        ),
        (["methods.ls.overrides.mixed.url=x"], r"^digits/ls: mixed: .*`mixed` to true"),
    ],
)
def test_what_makes_no_grid_is_named(make_study, overrides, message):
    with pytest.raises(InputError, match=message):
        cells_of(make_study(*overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['methods={"a/b": {}}'], r"^methods: .*'a/b' names a folder: use letters"),
        (['methods={"..": {}}'], r"^methods: .*'\.\.' names a folder"),
        (["methods={CE: {}, ce: {}}"], r"^methods: .*differ only in upper and lower case"),
        (["datasets={}"], r"^datasets: "),
        (["seeds=[1, 1]"], r"^seeds = .*give each seed once"),
        (["methods.ls.post_hoc={x: platt}"], r"^methods\.ls\.post_hoc\.x = 'platt': "),
    ],
)
def test_settings_of_a_study_are_checked(make_study, overrides, message):
    with pytest.raises(InputError, match=message):
        make_study(*overrides)


def test_a_cell_that_cannot_be_trained_is_named_before_anything_runs(make_study):
    study = make_study("methods.ls.overrides.loss.name=lss")
    with pytest.raises(InputError, match=r"^digits/ls: loss\.name = lss: did you mean ls\? "):
        check_cells(cells_of(study))
    check_cells(cells_of(make_study()))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("study-*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_train_acls_with_the_margin_of_small_images(path):
    """The default, 10, is the margin for Tiny-ImageNet."""
    losses = [cell.config.loss for cell in cells_of(load_settings(StudyConfig, path))]
    assert {loss.params.get("margin") for loss in losses if loss.name == "acls"} <= {6}


def test_cells_are_chosen_by_name(make_study):
    cells = cells_of(make_study(TWO))
    assert [cell.name for cell in select_cells(cells, ["*/ce", "small/m*"])] == [
        "small/ce",
        "small/mac",
        "smaller/ce",
    ]
    assert select_cells(cells, []) == cells
    with pytest.raises(InputError, match=r"^--only = ce: no cell .*; choose from small/"):
        select_cells(cells, ["small/ce", "ce"])


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


def test_cells_with_one_first_stage_are_one_job(make_study):
    cells = cells_of(make_study())
    assert plan_jobs(cells, slots=1) == [
        Job(("digits/ce", "digits/mac"), (0, 1, 2)),
        Job(("digits/ls",), (0, 1, 2)),
    ]


def test_seeds_are_split_where_jobs_are_too_few(make_study):
    cells = cells_of(make_study())
    assert plan_jobs(cells, slots=4) == [
        Job(("digits/ce", "digits/mac"), (0, 2), shares_runs=True),
        Job(("digits/ce", "digits/mac"), (1,), shares_runs=True),
        Job(("digits/ls",), (0, 2), shares_runs=True),
        Job(("digits/ls",), (1,), shares_runs=True),
    ]
    assert len(plan_jobs(cells, slots=99)) == 6


def test_only_the_runs_that_fill_no_round_are_split(make_study):
    cells = [cell for cell in cells_of(make_study()) if cell.method != "mac"]
    three = [*cells, replace(cells[1], method="third", config=other_loss(cells[1].config))]
    assert [job.shares_runs for job in plan_jobs(three, slots=2)] == [False, False, True, True]
    assert [job.seeds for job in plan_jobs(three, slots=2)[2:]] == [(0, 2), (1,)]


def other_loss(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"epochs": config.epochs + 1})


def test_a_first_stage_is_shared_only_if_all_its_settings_are(make_study):
    study = make_study('datasets={"a": {}, "b": {}}', "methods.mac.overrides.epochs=2")
    assert len(plan_jobs(cells_of(study), slots=1)) == 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A study's folder in which seed 0 of ce is trained."""
    out = tmp_path_factory.mktemp("study")
    cells = {c.method: c for c in cells_of(load_settings(StudyConfig, STUDY, ["seeds=[0]"]))}
    train_run(claim_run(cells["ce"].config, cells["ce"].run(out)).parent)
    return out, cells


def test_a_head_on_a_shared_stage_is_the_head_on_its_own(trained, tmp_path, capsys):
    out, cells = trained
    shared = claim_run(cells["mac"].config, cells["mac"].run(out)).parent
    own = claim_run(cells["mac"].config, tmp_path / "own").parent
    assert copy_first_stage(shared, seed=0) == cells["ce"].run(out)
    assert copy_first_stage(shared, seed=0) is None  # it is begun now
    train_run(own)
    capsys.readouterr()
    train_run(shared)
    assert "seed 0 head 2/2" in (printed := capsys.readouterr().out)
    assert "base" not in printed
    rows = [json.loads((run / "evaluation.json").read_text())["rows"] for run in (own, shared)]
    for row in (*rows[0], *rows[1]):
        del row["source"]  # digest of the file, which also says where it was trained
    assert rows[0] == rows[1]


def test_nothing_is_taken_over_from_other_settings_or_data(trained, tmp_path):
    out, cells = trained
    ls = claim_run(cells["ls"].config, cells["ls"].run(out)).parent
    assert copy_first_stage(ls, seed=0) is None
    assert not (ls / "seed-0").exists()
    late = claim_run(cells["mac"].config, out / "digits" / "late").parent
    assert copy_first_stage(late, seed=1) is None  # a seed that nobody has trained
    record = json.loads((out / "digits/ce/data.json").read_text())
    assert copy_first_stage(late, seed=0) is not None
    (late / "data.json").write_text(json.dumps({**record, "real": "of other images"}))
    with pytest.raises(InputError, match=r"data\.json real = of other images: is not what"):
        train_run(late)


def test_a_row_that_is_not_measured_is_refused(make_study):
    ensemble = make_study("methods.ce.post_hoc={CE together: ensemble}")
    with pytest.raises(InputError, match=r"CE together = ensemble: needs `base.evaluation.ens"):
        cells_of(ensemble)
    with pytest.raises(InputError, match=r"CE \+ SMART = smart: is not among `base.evaluation"):
        cells_of(make_study("methods.ce.post_hoc={CE + SMART: smart}"))
