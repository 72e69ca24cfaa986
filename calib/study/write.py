"""Write what a study found: Markdown, CSV, LaTeX, JSON and figures, from the run folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.run_folder import EVALUATION, is_measured
from calib.study.cells import Cell
from calib.study.config import StudyConfig
from calib.study.failures import failure_of
from calib.study.results import read_results
from data.files import read_json, write_atomically, write_json

SCHEMA = 1
STUDY = "study.json"
NOT_RUN = "not run yet"
FIGURES = "figures"


def write_study(study: StudyConfig, cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    """Write study.md, study-validation.md, study.csv, study.tex, study.json and figures.

    Args:
        cells: all of them, measured or not; the tables say which are not.
    Returns:
        What study.json holds.
    Raises:
        InputError: what `read_results` refuses.
    """
    from calib.study.figures import write_figures
    from calib.study.latex import as_latex
    from calib.study.markdown import as_markdown
    from calib.study.records import as_csv, table_records
    from calib.study.table import make_tables

    results = read_results(cells, out)
    missing = missing_cells(cells, out)
    test, validation = (make_tables(study, results, split) for split in ("test", "validation"))
    figures = [f"{FIGURES}/{name}" for name in write_figures(test, results, out / FIGURES)]
    runs, versions = what_ran(cells, out)
    facts = _sentence(runs, versions)
    texts = {
        "study.md": as_markdown(study, test, missing=missing, figures=figures, facts=facts),
        "study-validation.md": as_markdown(study, validation, missing=missing, facts=facts),
        "study.csv": as_csv(test),
        "study.tex": as_latex(study, test, missing=missing),
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    record = {
        "schema": SCHEMA,
        "name": study.name,
        "seeds": list(study.seeds),
        "missing": missing,
        "test": table_records(test),
        "validation": table_records(validation),
        "runs": runs,
        "versions": versions,
        "figures": figures,
        "config": study.model_dump(mode="json"),
    }
    write_json(out / STUDY, record)
    return record


def missing_cells(cells: Sequence[Cell], out: Path) -> dict[str, str]:
    """Cells that are not measured: by name, why as far as is known."""
    return {
        cell.name: failure_of(cell.run(out)) or NOT_RUN
        for cell in cells
        if not is_measured(cell.config, cell.run(out))
    }


def what_ran(cells: Sequence[Cell], out: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Digest and seconds of every run that is measured, and the versions they ran with.

    The seconds are those of training and measuring all seeds, without first stages that were
    taken over; digests are equal only for equal settings and data.
    """
    runs: dict[str, dict[str, Any]] = {}
    versions: dict[str, list[str]] = {}
    for cell in cells:
        if is_measured(cell.config, cell.run(out)):
            found = read_json(cell.run(out) / EVALUATION)
            runs[cell.name] = {"digest": found["digest"], "seconds": found["seconds"]}
            for library, version in found["versions"].items():
                if version not in versions.setdefault(library, []):
                    versions[library].append(version)
    return runs, {library: " / ".join(found) for library, found in versions.items()}


def _sentence(runs: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    if not runs:
        return ""
    minutes = sum(run["seconds"] for run in runs.values()) / 60
    names = ", ".join(f"{library} {version}" for library, version in versions.items())
    return f"Training and measuring {len(runs)} runs took {minutes:.1f} minutes, with {names}."
