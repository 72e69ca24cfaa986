"""Run a study: train and measure every cell that is not measured, then write the tables."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semix.calib.run_folder import CONFIG, claim_run, is_measured, is_run, refuse_other_run
from semix.calib.study import Cell, StudyConfig, cells_of, check_cells, choose
from semix.calib.study_tables import STUDY, write_study
from semix.data.errors import InputError
from semix.data.files import read_json, write_json
from semix.data.imagefolder import refuse_among_pictures
from semix.data.settings import whole_path
from semix.data.store import Store
from semix.flows.calling import run_flow
from semix.flows.configs import load_config
from semix.flows.failures import RunFailed
from semix.flows.gpus import visible_gpus
from semix.flows.paths import check_writable, training_folder
from semix.flows.slots import MOST_SLOTS
from semix.flows.study_builds import MixedPlan, mixed_plans

SETTINGS = "settings.json"  # of a study that was given as an object, not as a file

log = logging.getLogger("semix.study")


class StudyFailed(RunFailed):
    """Cells of a study could not be trained or measured; the others are."""


def study(
    config: StudyConfig | str | Path,
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    slots: int | None = None,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Start a study, or continue it.

    Mixed datasets that its `builds` name are made first, with the small models that they need.
    Measured cells are left as they are, interrupted ones go on from their checkpoints. A cell
    that fails does not stop the others; the tables are written with what there is.

    Args:
        config: settings, or the path or URL of a YAML file of them; `overrides` as in
            `section.key=value`.
        out: the study's folder; DATASET/METHOD below it are ordinary run folders, with splits
            and draws DATASET-split0-draw1/METHOD; mixed/ holds the mixed datasets that it makes.
        slots: trainers, and before them workers of builds, at a time; None is one a GPU, or one.
        only: names of cells as DATASET/METHOD, `*` and `?` as in file names; empty for all.
    Returns:
        What study.json holds.
    Raises:
        InputError: settings or folder cannot be used; nothing was started.
        StudyFailed: names the cells that are not measured, and why.
    """
    out = training_folder(out)
    source = config.model_dump(mode="json") if isinstance(config, StudyConfig) else config
    ready = prepared(source, out, overrides, slots=slots or 0, only=only)
    if not ready.todo:
        log.info("%s: every chosen cell is measured already", out)
        return write_study(ready.settings, ready.cells, out)
    if isinstance(config, StudyConfig):
        write_json(out / SETTINGS, source)
        config, overrides = out / SETTINGS, ()
    run_flow(
        "semix.flows.study_flow.study_flow",
        lambda: kept(ready.cells, out),
        ready=ready,
        config=whole_path(config),
        out=str(out),
        overrides=list(overrides),
        slots=slots or 0,
        only=list(only),
    )
    record: dict[str, Any] = read_json(out / STUDY)
    return record


@dataclass(frozen=True)
class ReadyStudy:
    """A study that nothing speaks against.

    Attributes:
        todo: the chosen cells that are not measured; the settings of their runs are written.
        mixed: the mixed datasets that all cells need, made or not.
    """

    settings: StudyConfig
    cells: Sequence[Cell]
    todo: Sequence[Cell]
    mixed: Sequence[MixedPlan]


def prepared(
    config: str | Path | Mapping[str, Any],
    out: Path,
    overrides: Sequence[str],
    *,
    slots: int,
    only: Sequence[str],
) -> ReadyStudy:
    """All cells, and those to run: checked, with the settings of every run written.

    Raises:
        InputError: settings or folder cannot be used; nothing is started.
    """
    settings = load_config(StudyConfig, config, overrides)
    if not 0 <= slots <= MOST_SLOTS:
        raise InputError("--slots", slots, f"choose 1 to {MOST_SLOTS}")
    place, cells = Store(str(out)), cells_of(settings, out)
    if not any(is_run(path.parent) for path in out.glob(f"*/*/{CONFIG}")):
        for cell in cells:
            refuse_among_pictures(cell.config.real.path, out)
        place.require_empty_or_own("study", own=STUDY)
    todo = [c for c in choose(cells, only) if not is_measured(c.config, c.run(out))]
    for cell in cells:  # the tables will show them all
        refuse_other_run(cell.config, cell.run(out))
    check_writable("out", out)
    mixed = mixed_plans(settings, cells)
    check_cells(todo)
    if todo:
        visible_gpus()  # or why that cannot be known
    place.check_writable()
    for cell in todo:
        claim_run(cell.config, cell.run(out))
    return ReadyStudy(settings, cells, todo, mixed)


def kept(cells: Sequence[Cell], out: Path) -> str:
    """What is safe of a study that was lost, and the command that goes on."""
    done = sum(is_measured(cell.config, cell.run(out)) for cell in cells)
    return f"{done} of {len(cells)} cells are measured; the same command goes on"


def failure_message(missing: dict[str, str], *, cells: int, out: Path) -> str:
    """Which cells are not measured, why, and how to go on."""
    lines = [f"{len(missing)} of {cells} cells are not measured:"]
    lines += [f"{name}: {reason}" for name, reason in missing.items()]
    these = " ".join(f"--only {name}" for name in missing)
    lines.append(f"{out / 'study.md'} shows the others; the same command goes on, with")
    lines.append(f"{these} these alone")
    return "\n".join(lines)
