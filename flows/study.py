"""Run a study: train and measure every cell that is not measured, then write the tables."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semix.calib.run_folder import CONFIG, check_same_config, claim_run, is_measured, is_run
from semix.calib.study import Cell, StudyConfig, cells_of, check_cells, select_cells
from semix.calib.study_jobs import check_same_images
from semix.calib.study_tables import STUDY_JSON, write_study
from semix.data.errors import InputError
from semix.data.files import read_json, write_json
from semix.data.imagefolder import check_outside_images
from semix.data.settings import whole_path
from semix.data.store import Store
from semix.flows.calling import run_flow
from semix.flows.configs import load_config
from semix.flows.failures import RunFailed
from semix.flows.gpus import visible_gpus
from semix.flows.launcher import check_restarts
from semix.flows.paths import check_writable, training_folder
from semix.flows.slots import MAX_SLOTS
from semix.flows.study_builds import MixedPlan, mixed_plans

SETTINGS = "settings.json"  # of a study whose config is an object instead of a file

log = logging.getLogger("semix.study")


class StudyFailed(RunFailed):
    """Some cells of a study could not be trained or measured; the others are measured."""


def study(
    config: StudyConfig | str | Path,
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    slots: int | None = None,
    only: Sequence[str] = (),
    restarts: int = 0,
) -> dict[str, Any]:
    """Start a study, or continue it.

    The mixed datasets of its section `builds` are made first, with the small models they need.
    Measured cells stay, and interrupted ones go on from their checkpoints. A failed cell does not
    stop the others; the tables show all measured cells.

    Args:
        config: settings, or the path or URL of a YAML file of them; `overrides` as in
            `section.key=value`.
        out: the study's folder; it holds run folders DATASET/METHOD, or with splits and draws
            DATASET-split0-draw1/METHOD, and in mixed/ the mixed datasets that the study builds.
        slots: number of trainers, or of workers of builds; None means one per GPU, or one.
        only: names of cells as DATASET/METHOD, `*` and `?` as in file names; empty for all.
        restarts: how often a trainer that was killed or crashed is started again.
    Returns:
        The content of study.json.
    Raises:
        InputError: settings or folder cannot be used; nothing was started.
        StudyFailed: names the cells that are not measured, and why.
    """
    out = training_folder(out)
    source = config.model_dump(mode="json") if isinstance(config, StudyConfig) else config
    prepared = prepare_study(source, out, overrides, slots=slots or 0, only=only, restarts=restarts)
    if not prepared.todo:
        log.info("%s: every selected cell is measured already", out)
        return write_study(prepared.settings, prepared.cells, out)
    if isinstance(config, StudyConfig):
        write_json(out / SETTINGS, source)
        config, overrides = out / SETTINGS, ()
    run_flow(
        "semix.flows.study_flow.study_flow",
        lambda: resume_hint(prepared.cells, out),
        prepared=prepared,
        config=whole_path(config),
        out=str(out),
        overrides=list(overrides),
        slots=slots or 0,
        only=list(only),
        restarts=restarts,
    )
    record: dict[str, Any] = read_json(out / STUDY_JSON)
    return record


@dataclass(frozen=True)
class PreparedStudy:
    """A study that passed all checks.

    Attributes:
        todo: the selected cells that are not measured; the settings of their runs are written.
        mixed: the mixed datasets that the cells need, built or not.
    """

    settings: StudyConfig
    cells: Sequence[Cell]
    todo: Sequence[Cell]
    mixed: Sequence[MixedPlan]


def prepare_study(
    config: str | Path | Mapping[str, Any],
    out: Path,
    overrides: Sequence[str],
    *,
    slots: int,
    only: Sequence[str],
    restarts: int,
) -> PreparedStudy:
    """Check a study, and write the settings of the runs to do.

    Raises:
        InputError: settings or folder cannot be used; nothing was started.
    """
    settings = load_config(StudyConfig, config, overrides)
    if not 0 <= slots <= MAX_SLOTS:
        raise InputError("--slots", slots, f"choose 1 to {MAX_SLOTS}")
    check_restarts(restarts)
    store, cells = Store(str(out)), cells_of(settings, out)
    if not any(is_run(path.parent) for path in out.glob(f"*/*/{CONFIG}")):
        for cell in cells:
            check_outside_images(cell.config.real.folder, out)
        store.require_empty_or_own("study", own=STUDY_JSON)
    todo = [c for c in select_cells(cells, only) if not is_measured(c.config, c.run(out))]
    for cell in cells:  # the tables show all of them
        check_same_config(cell.config, cell.run(out))
    check_writable("out", out)
    mixed = mixed_plans(settings, cells)
    check_cells(todo)
    if todo:
        check_same_images(todo, cells, out)
        visible_gpus()  # raises if the driver does not work
    store.check_writable()
    for cell in todo:
        claim_run(cell.config, cell.run(out))
    return PreparedStudy(settings, cells, todo, mixed)


def resume_hint(cells: Sequence[Cell], out: Path) -> str:
    """How much of a lost study is measured, and the command that goes on."""
    done = sum(is_measured(cell.config, cell.run(out)) for cell in cells)
    return f"{done} of {len(cells)} cells are measured; the same command goes on"


def failure_message(missing: dict[str, str], *, cells: int, out: Path) -> str:
    """The cells that are not measured, the reasons, and how to go on."""
    lines = [f"{len(missing)} of {cells} cells are not measured:"]
    lines += [f"{name}: {reason}" for name, reason in missing.items()]
    only_options = " ".join(f"--only {name}" for name in missing)
    lines.append(f"{out / 'study.md'} shows the measured cells; the same command goes on; to run")
    lines.append(f"only these cells add {only_options}")
    return "\n".join(lines)
