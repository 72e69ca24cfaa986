"""A first stage that two cells share: planned together, trained once, the same to the bit."""

import json
from dataclasses import replace

import pytest

from calib.config import TrainConfig
from calib.run_folder import claim_run
from calib.study import Job, StudyConfig, cells_of, plan_jobs, take_over
from calib.train import train
from data.errors import InputError
from data.settings import load_settings
from tests.calib.study.studied import STUDY


def test_cells_with_one_first_stage_are_one_job(make_study):
    cells = cells_of(make_study())
    assert plan_jobs(cells, slots=1) == [
        Job(("digits/ce", "digits/mac"), (0, 1, 2)),
        Job(("digits/ls",), (0, 1, 2)),
    ]


def test_seeds_are_split_where_jobs_are_too_few(make_study):
    cells = cells_of(make_study())
    assert plan_jobs(cells, slots=4) == [
        Job(("digits/ce", "digits/mac"), (0, 2), split=True),
        Job(("digits/ce", "digits/mac"), (1,), split=True),
        Job(("digits/ls",), (0, 2), split=True),
        Job(("digits/ls",), (1,), split=True),
    ]
    assert len(plan_jobs(cells, slots=99)) == 6


def test_only_the_runs_that_fill_no_round_are_split(make_study):
    cells = [cell for cell in cells_of(make_study()) if cell.method != "mac"]
    three = [*cells, replace(cells[1], method="third", config=other_loss(cells[1].config))]
    assert [job.split for job in plan_jobs(three, slots=2)] == [False, False, True, True]
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
    train(claim_run(cells["ce"].config, cells["ce"].run(out)).parent)
    return out, cells


def test_a_head_on_a_shared_stage_is_the_head_on_its_own(trained, tmp_path, capsys):
    out, cells = trained
    shared = claim_run(cells["mac"].config, cells["mac"].run(out)).parent
    own = claim_run(cells["mac"].config, tmp_path / "own").parent
    assert take_over(shared, seed=0) == cells["ce"].run(out)
    assert take_over(shared, seed=0) is None  # it is begun now
    train(own)
    capsys.readouterr()
    train(shared)
    assert "seed 0 head 2/2" in (printed := capsys.readouterr().out)
    assert "base" not in printed
    rows = [json.loads((run / "evaluation.json").read_text())["rows"] for run in (own, shared)]
    for row in (*rows[0], *rows[1]):
        del row["source"]  # digest of the file, which also says where it was trained
    assert rows[0] == rows[1]


def test_nothing_is_taken_over_from_other_settings_or_data(trained, tmp_path):
    out, cells = trained
    ls = claim_run(cells["ls"].config, cells["ls"].run(out)).parent
    assert take_over(ls, seed=0) is None
    assert not (ls / "seed-0").exists()
    late = claim_run(cells["mac"].config, out / "digits" / "late").parent
    assert take_over(late, seed=1) is None  # a seed that nobody has trained
    record = json.loads((out / "digits/ce/data.json").read_text())
    assert take_over(late, seed=0) is not None
    (late / "data.json").write_text(json.dumps({**record, "real": "of other images"}))
    with pytest.raises(InputError, match=r"data\.json real = of other images: is not what"):
        train(late)
