"""The rows of `evaluation.json` for one seed: a stage each."""

from typing import Any

from calib.classifier import Stage
from calib.evaluation.foreign import measure_ood
from calib.evaluation.measures import measure
from calib.evaluation.shift import measure_shift
from calib.evaluation.trained import TrainedSeed
from calib.run_folder import SCHEMA, seed_evaluation
from data.files import read_json

Row = dict[str, Any]


def rows_of(trained: TrainedSeed, *, fresh: bool) -> list[Row]:
    """Measure the stages, base before head; no rows in a process that only helps.

    Args:
        fresh: run the networks whatever is stored.
    """
    config = trained.config.evaluation
    previous = {} if fresh else _previous(trained)
    found = trained.logits(fresh=fresh)
    rows: dict[Stage, Row] = {}
    if trained.is_main:
        rows = {stage: _row(trained, stage) | measure(found[stage], config) for stage in found}
    parts: dict[str, dict[Stage, Any]] = {}
    if config.shift is not None:
        parts["shift"] = _kept(previous, "shift", trained) or measure_shift(
            trained, config.shift, {stage: row["temperature"] for stage, row in rows.items()}
        )
    if config.ood:
        test = {stage: tensors["test_logits"] for stage, tensors in found.items()}
        parts["ood"] = _kept(previous, "ood", trained) or measure_ood(trained, config.ood, test)
    for name, by_stage in parts.items():
        for stage, row in rows.items():
            row[name] = by_stage[stage]
    return list(rows.values())


def _row(trained: TrainedSeed, stage: Stage) -> Row:
    logits = trained.logits_file(stage).relative_to(trained.run).as_posix()
    source = trained.sources[stage]
    return {"stage": stage, "seed": trained.seed, "logits": logits, "source": source}


def _previous(trained: TrainedSeed) -> dict[str, Any]:
    """What was measured of these weights before; empty if nothing was."""
    path = seed_evaluation(trained.run, trained.seed)
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    sources = {row["stage"]: row.get("source") for row in found.get("rows", [])}
    return found if found.get("schema") == SCHEMA and sources == trained.sources else {}


def _kept(previous: dict[str, Any], part: str, trained: TrainedSeed) -> dict[Stage, Any] | None:
    """Figures of an earlier evaluation under the same settings of this part."""
    settings = trained.config.evaluation.model_dump(mode="json")
    if not previous or previous["evaluation"][part] != settings[part]:
        return None
    return {row["stage"]: row[part] for row in previous["rows"]}
