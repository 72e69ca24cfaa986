"""Run a study: train and measure every cell that is not measured, then write the tables."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.run_folder import claim_run, is_measured
from calib.study import (
    Cell,
    StudyConfig,
    cells_of,
    check_cells,
    choose,
    naming,
    plan_jobs,
    read_results,
    write_study,
)
from data.errors import InputError
from data.settings import load_settings
from data.store import Store
from flows.errors import RunFailed
from flows.gpus import visible_gpus
from flows.server import prefect_server
from flows.train import check_launch

MOST_SLOTS = 200  # task runs of one flow that a Prefect server follows without loss

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
        config: settings, or a YAML file of them; `overrides` as in `section.key=value`.
        out: the study's folder; DATASET/METHOD below it are ordinary run folders.
        slots: trainers at a time; None is one a GPU, or one.
        only: names of cells as DATASET/METHOD, `*` and `?` as in file names; empty for all.
    Returns:
        What study.json holds.
    Raises:
        InputError: settings or folder cannot be used; nothing was started.
        StudyFailed: names the cells that are not measured, and why.
    """
    source = config.model_dump(mode="json") if isinstance(config, StudyConfig) else config
    settings = load_settings(StudyConfig, source, overrides)
    if slots is not None and not 1 <= slots <= MOST_SLOTS:
        raise InputError("--slots", slots, f"choose 1 to {MOST_SLOTS}")
    out = Path(out).absolute()
    cells = cells_of(settings)
    todo = [c for c in choose(cells, only) if not is_measured(c.config, c.run(out))]
    _prepare(cells, todo, out)
    if not todo:
        log.info("%s: every chosen cell is measured already", out)
        return write_study(settings, cells, out)
    failed = None
    try:
        _run(todo, out, slots=slots or max(1, len(visible_gpus())), name=settings.name)
    except StudyFailed as error:
        failed = error
    record = write_study(settings, cells, out)
    if failed is not None:
        raise failed
    return record


def _prepare(cells: Sequence[Cell], todo: Sequence[Cell], out: Path) -> None:
    """Refuse what cannot be run before anything is; write the settings of every run."""
    read_results(cells, out)
    check_cells(todo)
    for cell in todo:
        with naming(cell.name):
            check_launch(cell.config, num_processes=1)
    Store(str(out)).check_writable()
    for cell in todo:
        claim_run(cell.config, cell.run(out))


def _run(todo: Sequence[Cell], out: Path, *, slots: int, name: str) -> None:
    jobs = plan_jobs(todo, slots=slots)
    with prefect_server():
        # Prefect costs seconds: not before there is something to run.
        from flows.study_flow import run_study

        run_study(out, jobs, slots=min(slots, len(jobs)), name=name)


def failure_message(missing: dict[str, str], *, cells: int, out: Path) -> str:
    """Which cells are not measured, why, and how to go on."""
    lines = [f"{len(missing)} of {cells} cells are not measured:"]
    lines += [f"{name}: {reason}" for name, reason in missing.items()]
    these = " ".join(f"--only {name}" for name in missing)
    lines.append(f"{out / 'study.md'} shows the others; the same command goes on, with")
    lines.append(f"{these} these alone")
    return "\n".join(lines)
