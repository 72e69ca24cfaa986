"""Plan the jobs of a study, share first stages between runs, and record why runs failed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from semix.calib.config import TrainConfig
from semix.calib.run_folder import (
    CONFIG,
    DATA,
    MODEL,
    DataRecord,
    begun_data,
    pin_data,
    read_data,
    run_digest,
    seed_folder,
)
from semix.calib.study import Cell
from semix.data.errors import InputError
from semix.data.files import read_json, write_json
from semix.data.fingerprint import fingerprint
from semix.data.settings import load_settings

TRAINED_IN = "trained_in"  # key in the metadata of a model that was copied from another run
FAILURE = "failure.json"


@dataclass(frozen=True)
class Job:
    """What one slot trains at a time: some seeds of runs that share their first stage.

    Attributes:
        runs: folders in that of the study; the first run trains the first stage for the others.
        seeds: all or some of the runs' seeds.
        shares_runs: whether other jobs train the other seeds of these runs.
    """

    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    shares_runs: bool = False


def check_same_images(todo: Sequence[Cell], cells: Sequence[Cell], out: Path) -> None:
    """Refuse to train further cells on real images that have changed since others began.

    Raises:
        InputError: names the data.json of a run that began with other images.
    """
    from semix.calib.training_data import real_digest  # imports torch
    from semix.data.real import load_real

    for settings in dict.fromkeys(cell.config.real for cell in todo):
        runs = [cell.run(out) for cell in cells if cell.config.real == settings]
        begun = {run: data["real"] for run in runs if (data := begun_data(run)) is not None}
        digest = real_digest(load_real(settings)) if begun else None
        for run, other in begun.items():
            if other != digest:
                remedy = "is not the digest of the images now; restore them or name a fresh folder"
                raise InputError(f"{run / DATA} real", other, remedy)


def plan_jobs(cells: Sequence[Cell], *, slots: int) -> list[Job]:
    """Plan jobs for all slots; if the last runs are too few for the slots, divide their seeds."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell.replicate} {first_stage(cell.config)}", []).append(cell)
    jobs, last_groups = [], len(groups) % slots
    for index, group in enumerate(groups.values()):
        seeds, runs = group[0].config.seeds, tuple(cell.name for cell in group)
        whole = index < len(groups) - last_groups
        num_parts = 1 if whole else min(len(seeds), -(-slots // last_groups))
        jobs += [Job(runs, seeds[start::num_parts], num_parts > 1) for start in range(num_parts)]
    return jobs


def first_stage(config: TrainConfig) -> str:
    """Digest of all settings that influence the result of stage one."""
    return fingerprint({key: value for key, value in config.identity().items() if key != "head"})


def copy_first_stage(run: Path, *, seed: int) -> Path | None:
    """Copy the first stage of a sibling run with the same settings, unless the seed has begun.

    The copied model file gets this run's digest and the name of the run that trained it. The
    trainer then finds that the stage is done, or refuses the file if the data has changed.

    Returns:
        The run that trained the stage; None if the seed has begun, or no sibling matches.
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
            new = {TRAINED_IN: sibling.name, **metadata, "digest": run_digest(config, data)}
            save_tensors(seed_folder(run, seed) / MODEL, load_tensors(path), metadata=new)
            return sibling
    return None


def _trained_on(sibling: Path, config: TrainConfig, *, digest: str | None) -> DataRecord | None:
    """The data of a sibling, if its model has this digest and is the first stage of `config`."""
    if digest is None or not ((sibling / CONFIG).is_file() and (sibling / DATA).is_file()):
        return None
    other = load_settings(TrainConfig, sibling / CONFIG)
    data = read_data(sibling)
    matches = first_stage(other) == first_stage(config) and digest == run_digest(other, data)
    return data if matches else None


# The reason why a run failed, in a file in its folder


def note_failure(run: Path, reason: str, *, last_lines: Sequence[str]) -> None:
    """Record why a run failed.

    Args:
        reason: one line.
        last_lines: the last lines of the trainer's output.
    """
    write_json(run / FAILURE, {"reason": reason, "last_lines": list(last_lines)})


def forget_failure(run: Path) -> None:
    (run / FAILURE).unlink(missing_ok=True)


def failure_of(run: Path) -> str | None:
    """The reason why a run failed; None if it did not."""
    path = run / FAILURE
    return str(read_json(path)["reason"]) if path.is_file() else None
