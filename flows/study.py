"""Run a study: train and measure every cell that is not measured, then write the tables."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.run_folder import CONFIG, claim_run, is_measured, is_run, refuse_other_run
from calib.study import Cell, StudyConfig, cells_of, check_cells, choose
from calib.study_tables import STUDY, write_study
from data.errors import InputError
from data.files import read_json, write_json
from data.settings import whole_path
from data.store import Store
from flows.configs import load_config
from flows.errors import RunFailed
from flows.gpus import visible_gpus
from flows.places import check_writable, training_folder
from flows.server.run_server import prefect_server
from flows.slots import MOST_SLOTS

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

    Measured cells are left as they are, interrupted ones go on from their checkpoints. A cell
    that fails does not stop the others; the tables are written with what there is.

    Args:
        config: settings, or the path or URL of a YAML file of them; `overrides` as in
            `section.key=value`.
        out: the study's folder; DATASET/METHOD below it are ordinary run folders.
        slots: trainers at a time; None is one a GPU, or one.
        only: names of cells as DATASET/METHOD, `*` and `?` as in file names; empty for all.
    Returns:
        What study.json holds.
    Raises:
        InputError: settings or folder cannot be used; nothing was started.
        StudyFailed: names the cells that are not measured, and why.
    """
    out = training_folder(out)
    source = config.model_dump(mode="json") if isinstance(config, StudyConfig) else config
    settings = load_config(StudyConfig, source, overrides)
    cells, todo = prepared(settings, out, slots=slots or 0, only=only)
    if not todo:
        return tables(settings, cells, out)
    if isinstance(config, StudyConfig):
        write_json(out / SETTINGS, source)
    with prefect_server():
        # Prefect costs seconds: not before there is something to run.
        from flows.flow_runs import call_flow
        from flows.study_flow import study_flow

        call_flow(
            study_flow,
            lambda: kept(cells, out),
            config=str(out / SETTINGS) if isinstance(config, StudyConfig) else whole_path(config),
            out=str(out),
            overrides=list(overrides),
            slots=slots or 0,
            only=list(only),
        )
    record: dict[str, Any] = read_json(out / STUDY)
    return record


def prepared(
    settings: StudyConfig, out: Path, *, slots: int, only: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """All cells, and those to run: checked, with the settings of every run written.

    Raises:
        InputError: settings or folder cannot be used; nothing is started.
    """
    if not 0 <= slots <= MOST_SLOTS:
        raise InputError("--slots", slots, f"choose 1 to {MOST_SLOTS}")
    place = Store(str(out))
    if not any(is_run(path.parent) for path in out.glob(f"*/*/{CONFIG}")):
        place.refuse_strangers("study", own=STUDY)
    cells = list(cells_of(settings))
    todo = [c for c in choose(cells, only) if not is_measured(c.config, c.run(out))]
    for cell in cells:  # the tables will show them all
        refuse_other_run(cell.config, cell.run(out))
    check_writable("out", out)
    check_cells(todo)
    if todo:
        visible_gpus()  # or why that cannot be known
    place.check_writable()
    for cell in todo:
        claim_run(cell.config, cell.run(out))
    return cells, todo


def tables(settings: StudyConfig, cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    """Write them although there is nothing to run."""
    log.info("%s: every chosen cell is measured already", out)
    return write_study(settings, cells, out)


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
