"""How a build begins: its root opened or created, damage put aside, workers' needs checked."""

import logging
from collections.abc import Sequence

from data.errors import InputError
from data.imagefolder import Survey, survey
from data.real import RealDataConfig
from data.repair import put_aside
from data.root import Root
from flows.configs import load_config
from flows.progress import counting
from flows.selection import Selection
from flows.slots.settings import SlotSettings, check_slots
from pipeline.checks import check_models, notes
from pipeline.config import BuildConfig
from pipeline.root import create_root, plan_of

ALL = Selection()

log = logging.getLogger("semix.build")


def opened(out: str, config: str, overrides: Sequence[str]) -> Root:
    """The root that a run works on: of a config file, begun where it is new; else as it is there.

    Raises:
        InputError: no root and no config, or one that cannot be used, or of another root.
    """
    if config:
        return create_root(load_config(BuildConfig, config, overrides), out)
    if overrides:
        remedy = "a root keeps the settings it was begun with; leave these out, or give its config"
        raise InputError("overrides", ", ".join(overrides), remedy)
    return Root(out)


def put_damage_aside(root: Root, *, full: bool = False) -> None:
    """Make damaged parts missing. `full` reads every file; else sizes are compared."""
    damage = root.verify(full=full)
    for problem in damage:
        log.warning("%s", problem)
    if count := put_aside(root, damage):
        log.warning("put %d damaged parts aside; making them again", count)


def check_work(root: Root, slots: SlotSettings) -> None:
    """Raises InputError for what would keep every slot from working."""
    check_slots(slots)
    if not root.store.shared:
        raise InputError("out", root.url, "worker processes cannot share memory; use a path")
    check_models(plan_of(root).config)


def survey_images(config: RealDataConfig) -> Survey:
    """Decode all pictures of a folder, under a bar. Raises InputError for what cannot be used."""
    with counting("decoding real images") as show:
        return survey(config, show)


def say_notes(config: BuildConfig) -> None:
    for note in notes(config):
        log.warning("%s", note)
