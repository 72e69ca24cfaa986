"""Who trains what in a study, first stages that runs share, and why a run is not measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from semix.calib.config import TrainConfig
from semix.calib.run_folder import (
    CONFIG,
    DATA,
    MODEL,
    DataRecord,
    pin_data,
    read_data,
    run_digest,
    seed_folder,
)
from semix.calib.study import Cell
from semix.data.files import read_json, write_json
from semix.data.fingerprint import fingerprint
from semix.data.settings import load_settings

TRAINED_IN = "trained_in"  # in the metadata of a model that was taken over
FAILURE = "failure.json"


@dataclass(frozen=True)
class Job:
    """What one slot does at a stretch: some seeds of runs that share their first stage.

    Attributes:
        runs: folders below that of the study; the first trains the stage for the others.
        seeds: of the cells' seeds, all or some.
        split: other jobs train the other seeds of these runs.
    """

    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    split: bool = False


def plan_jobs(cells: Sequence[Cell], *, slots: int) -> list[Job]:
    """Jobs that fill the slots: the last runs are split by seeds where they are too few."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell.replicate} {first_stage(cell.config)}", []).append(cell)
    jobs, rest = [], len(groups) % slots
    for index, group in enumerate(groups.values()):
        seeds, runs = group[0].config.seeds, tuple(cell.name for cell in group)
        whole = index < len(groups) - rest
        parts = 1 if whole else min(len(seeds), -(-slots // rest))
        jobs += [Job(runs, seeds[part::parts], parts > 1) for part in range(parts)]
    return jobs


def first_stage(config: TrainConfig) -> str:
    """Digest of all settings that decide what stage one leaves."""
    return fingerprint({key: value for key, value in config.identity().items() if key != "head"})


def take_over(run: Path, *, seed: int) -> Path | None:
    """Give a seed that was not begun the first stage of a run beside it with the same settings.

    The model file gets this run's digest, and names the run that trained it. The trainer then
    finds the stage done, and refuses it if the data has changed since.

    Returns:
        The run that trained it; None if the seed was begun, or no run beside it has what fits.
    """
    from semix.calib.checkpoint import load_tensors, read_metadata, save_tensors

    if seed_folder(run, seed).exists():
        return None
    config = load_settings(TrainConfig, run / CONFIG)
    for sibling in sorted(run.parent.iterdir()):
        path = seed_folder(sibling, seed) / MODEL
        metadata = read_metadata(path)
        data = _trained_on(sibling, config, digest=metadata.get("digest"))
        if data is not None:
            pin_data(data, run)
            metadata_here = {
                TRAINED_IN: sibling.name,
                **metadata,
                "digest": run_digest(config, data),
            }
            save_tensors(seed_folder(run, seed) / MODEL, load_tensors(path), metadata=metadata_here)
            return sibling
    return None


def _trained_on(sibling: Path, config: TrainConfig, *, digest: str | None) -> DataRecord | None:
    """The data of a sibling whose model has this digest, if its first stage is that of `config`."""
    if digest is None or not ((sibling / CONFIG).is_file() and (sibling / DATA).is_file()):
        return None
    other = load_settings(TrainConfig, sibling / CONFIG)
    data = read_data(sibling)
    same = first_stage(other) == first_stage(config) and digest == run_digest(other, data)
    return data if same else None


# Why a run is not measured: a small file in its folder


def note_failure(run: Path, reason: str, *, last_lines: Sequence[str]) -> None:
    """Remember why a run ended.

    Args:
        reason: one line.
        last_lines: the end of the trainer's output.
    """
    write_json(run / FAILURE, {"reason": reason, "last_lines": list(last_lines)})


def forget_failure(run: Path) -> None:
    (run / FAILURE).unlink(missing_ok=True)


def failure_of(run: Path) -> str | None:
    """The reason; None if the run did not fail."""
    path = run / FAILURE
    return str(read_json(path)["reason"]) if path.is_file() else None
