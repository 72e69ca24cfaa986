"""One tiny plan with its models loaded, and the contents of an unbroken build of it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from semix.data.formats import PROTOTYPES
from semix.data.root import Root
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import BuildPlan, build_of
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.shard import Models, generate_shard, load_models
from tests.pipeline.roots import create_root, plan_of

# Fields that say who made a shard and when; all others are a function of the plan.
CIRCUMSTANCES = {"seconds", "wall_seconds", "attempt", "worker", "record_bytes", "discards"}


@dataclass(frozen=True)
class Tiny:
    """A small plan with its models: any process makes a shard in a fraction of a second."""

    config: BuildConfig
    plan: BuildPlan
    models: Models
    prototypes: bytes

    def start(self, url: str) -> Root:
        root = create_root(self.config, url)
        root.store.create("prototypes.safetensors", self.prototypes)
        return root

    def make(self, root: Root, shard: int) -> None:
        generate_shard(self.plan.shard(shard), self.plan, models=self.models, root=root).publish()

    def finish(self, root: Root) -> Root:
        """Make every shard that the store lacks, as a resume does."""
        reopened = Root(root.url)
        for shard in reopened.missing():
            self.make(reopened, shard)
        return reopened


def tiny_plan(config: BuildConfig, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = create_root(config, str(tmp_path_factory.mktemp("tiny")))
    ensure_prototypes(build_of(root), device="cpu")
    plan = plan_of(root)
    models = load_models(plan, root.store.get(PROTOTYPES), device="cpu")
    return Tiny(config, plan, models, root.store.get("prototypes.safetensors"))


@pytest.fixture(scope="session")
def tiny(
    make_config: Callable[..., BuildConfig],
    hasty_standins,
    tmp_path_factory: pytest.TempPathFactory,
) -> Tiny:
    config = make_config(
        hasty_standins,
        "mixing.pairs={kind: sampled, count: 5}",
        "shards.groups_per_shard=2",
        "shards.groups_per_batch=2",
        "generator.steps=2",
    )
    return tiny_plan(config, tmp_path_factory)


@pytest.fixture(scope="session")
def unbroken(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    root = tiny.finish(tiny.start(str(tmp_path_factory.mktemp("unbroken"))))
    return contents(root)


def contents(root: Root) -> dict[str, object]:
    """Files of a root under shards/ by name, commit records without CIRCUMSTANCES."""
    files: dict[str, object] = {
        name: root.store.get(name)
        for name in root.store.list("shards")
        if not name.endswith(".json")
    }
    entries = {f"record {entry.shard}": entry for entry in root.records()}
    return files | {
        name: entry.model_dump(exclude=CIRCUMSTANCES) for name, entry in entries.items()
    }
