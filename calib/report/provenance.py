"""What was run: settings, data, versions and times, ready to be shown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.report.methods import load_evaluation
from data.files import read_json

ABSENT = "\N{EN DASH}"
OWN_SECTION = ("seconds", "splits", "versions", "limits")  # facts that the page places itself


@dataclass(frozen=True)
class RunRecord:
    """One run folder, as text."""

    name: str
    folder: str
    digest: str
    real: str  # digest of the real dataset
    mixed: str  # url, index and digest of the mixed dataset
    seconds: float
    config: str  # the whole resolved configuration, indented JSON


@dataclass(frozen=True)
class Provenance:
    """Everything under "What was run"."""

    runs: list[RunRecord]
    settings: list[tuple[str, list[str]]]  # only those in which the runs differ
    versions: dict[str, str]
    seconds: dict[str, float]
    splits: dict[str, Any]
    limits: list[str]
    other: dict[str, dict[str, str]]  # further facts by section


def provenance(runs: Sequence[Path], facts: Mapping[str, Any]) -> Provenance:
    """Collect what the run folders and the caller's facts say.

    Args:
        facts: as for `write_report`.
    Raises:
        InputError: a run without evaluation.json.
    """
    evaluations = [load_evaluation(Path(run)) for run in runs]
    configs = [read_json(Path(run) / "config.json") for run in runs]
    versions = [evaluation["versions"] for evaluation in evaluations]
    records = [
        _record(Path(run), evaluation, config)
        for run, evaluation, config in zip(runs, evaluations, configs, strict=True)
    ]
    training = {f"train and evaluate {record.name}": record.seconds for record in records}
    return Provenance(
        runs=records,
        settings=_differing([flatten(config) for config in configs]),
        versions=_merged([*versions, facts.get("versions", {})]),
        seconds={**facts.get("seconds", {}), **training},
        splits=dict(facts.get("splits", {})),
        limits=list(facts.get("limits", [])),
        other=_sections({key: facts[key] for key in facts if key not in OWN_SECTION}),
    )


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names: {"a": {"b": 1}} -> {"a.b": "1"}."""
    if isinstance(value, Mapping) and value:
        return {
            name: text
            for key, child in value.items()
            for name, text in flatten(child, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return {prefix: text}


def duration(seconds: float) -> str:
    """3725 -> "1 h 2 min", 72.4 -> "1 min 12 s", 4.23 -> "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _record(run: Path, evaluation: Mapping[str, Any], config: Mapping[str, Any]) -> RunRecord:
    data = read_json(run / "data.json")
    mixed = data["mixed"]
    return RunRecord(
        name=evaluation["name"],
        folder=str(run),
        digest=evaluation["digest"],
        real=data["real"],
        mixed=f"{mixed['url']} {mixed['index']} {mixed['digest']}" if mixed else "none",
        seconds=evaluation["seconds"],
        config=json.dumps(config, indent=2, ensure_ascii=False),
    )


def _differing(configs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Dotted names whose values differ; a part that some runs lack shows as absent settings."""
    every = sorted({name for config in configs for name in config})
    names = [name for name in every if not any(other.startswith(f"{name}.") for other in every)]
    rows = [(name, [config.get(name, ABSENT) for config in configs]) for name in names]
    return [(name, values) for name, values in rows if name != "name" and len(set(values)) > 1]


def _merged(versions: Sequence[Mapping[str, str]]) -> dict[str, str]:
    names = sorted({name for found in versions for name in found})
    return {
        name: " / ".join(dict.fromkeys(str(found[name]) for found in versions if name in found))
        for name in names
    }


def _sections(facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    loose = {key: value for key, value in facts.items() if not isinstance(value, Mapping)}
    sections = {key: flatten(value) for key, value in facts.items() if key not in loose}
    return ({"further facts": flatten(loose)} if loose else {}) | sections
