"""How a build begins: its root opened or created, damage put aside, workers' needs checked."""

import logging
from collections.abc import Sequence

from data.errors import InputError
from data.formats import PAIRS, PROTOTYPES
from data.imagefolder import Survey, survey
from data.root import Made, Root
from data.splits import RealDataConfig
from data.verify import damage, put_aside
from flows.configs import load_config
from flows.progress import counting
from flows.selection import Selection
from flows.slots.settings import SlotSettings, check_slots
from pipeline.checks import check_models, notes
from pipeline.config import BuildConfig
from pipeline.prototypes import prepare
from pipeline.root import config_of, create_root, open_root

ALL = Selection()

log = logging.getLogger("semix.build")


def opened(out: str, config: str, overrides: Sequence[str]) -> Root:
    """The root that a run works on: of a config file, begun where it is new; else as it is there.

    Raises:
        InputError: no root and no config, or one that cannot be used, or of another root.
    """
    if config:
        return create_root(load_config(BuildConfig, config, overrides), out)
    return open_root(out, overrides)


def put_damage_aside(root: Root, *, full: bool = False) -> None:
    """Make damaged parts missing. `full` reads every file; else sizes are compared."""
    found = damage(root, full=full)
    for problem in found:
        log.warning("%s", problem)
    if count := put_aside(root, found):
        log.warning("put %d damaged parts aside; making them again", count)


def restore(root: Root, device: str) -> None:
    """Measure and draw again what committed shards were made with, where it is gone.

    Workers do so before they make a shard; this is for a root that lacks none.

    Raises:
        InputError: it cannot be measured here, or comes out otherwise than the shards say.
    """
    files: dict[Made, str] = {"prototypes": PROTOTYPES, "pairs": PAIRS}
    named = [name for kind, name in files.items() if any(root.made_with(kind))]
    if not all(map(root.store.exists, named)):
        prepare(root, device=device)


def check_work(root: Root, slots: SlotSettings) -> None:
    """Raises InputError for what would keep every slot from working."""
    check_slots(slots)
    if not root.store.shared:
        raise InputError("out", root.url, "worker processes cannot share memory; use a path")
    try:
        check_models(config_of(root))
    except InputError as error:
        moved = f"semix resume {root.url} --set {error.field}=PLACE"
        remedy = f"{error.remedy}; if it lies elsewhere now: {moved}"
        raise InputError(error.field, error.value, remedy) from None


def survey_images(config: RealDataConfig) -> Survey:
    """Decode all pictures of a folder, under a bar. Raises InputError for what cannot be used."""
    with counting("decoding real images") as show:
        return survey(config, show)


def say_notes(config: BuildConfig) -> None:
    for note in notes(config):
        log.warning("%s", note)
