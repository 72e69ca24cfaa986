"""What groups and shards cost: denoiser rows and FLOP, by arithmetic alone."""

import math
from dataclasses import dataclass

from pipeline.config import BuildConfig, GeneratorConfig
from pipeline.costs import skeletons
from pipeline.costs.flops import ModelCosts, model_costs
from pipeline.costs.skeletons import Uncounted
from pipeline.generators.schedulers import sampler
from pipeline.noise.cost import noise_cost
from pipeline.plan import BuildPlan, ShardSpec
from pipeline.rows import Rows, count_rows

TERA = 1e12


@dataclass(frozen=True)
class Work:
    """What a series costs.

    Attributes:
        images: in a series.
        rows: of the denoiser, for a series.
        costs: FLOP of a row, a decoded and an encoded image.
    """

    images: int
    rows: Rows
    costs: ModelCosts

    def tflop(self, *, groups: int, computed: int, noise_rows: float = 0) -> float:
        """TFLOP of some groups.

        Args:
            computed: `groups` with those that fill up the last batches, which are generated and
                decoded but not encoded.
            noise_rows: spent on choosing noise.
        """
        costs = self.costs
        series = self.rows.full * costs.row + self.rows.shallow * costs.shallow_row
        series += self.images * costs.decode
        clip = groups * self.images * costs.clip
        return (computed * series + clip + noise_rows * costs.row) / TERA

    def shard_tflop(self, plan: BuildPlan, spec: ShardSpec) -> float:
        """TFLOP of one shard, with its share of what choosing noise takes; all shards add up to
        the whole build."""
        groups = spec.stop - spec.start
        computed = computed_groups(groups, plan.config.shards.groups_per_batch)
        noise = noise_rows(plan) * computed / all_computed_groups(plan)
        return self.tflop(groups=groups, computed=computed, noise_rows=noise)


def work_or_reason(config: BuildConfig) -> tuple[Work, None] | tuple[None, str]:
    """The work of a series, or why it is not known."""
    try:
        return series_work(config), None
    except Uncounted as error:
        return None, str(error)


def series_work(config: BuildConfig) -> Work:
    """Counted from the models' config files; weights are not needed.

    Raises:
        Uncounted: they are not on this machine, or such a network cannot be counted.
        InputError: the model's scheduler cannot be used.
    """
    images = config.mixing.images
    rows = count_rows(config.generator, images, calls=network_calls(config.generator))
    return Work(images, rows, model_costs(config))


def network_calls(config: GeneratorConfig) -> int:
    """Calls of the denoiser in one sampling, by the scheduler itself: PNDM makes one more than
    its steps, Heun nearly two a step.

    Raises:
        Uncounted: the model brings the scheduler, and is not on this machine.
        InputError: the scheduler cannot be used.
    """
    scheduler = sampler(
        skeletons.own_scheduler(config),
        name=config.approximate.scheduler or config.scheduler,
        spacing=config.timestep_spacing,
    )
    scheduler.set_timesteps(config.approximate.steps or config.steps)
    return len(scheduler.timesteps)


def computed_groups(groups: int, batch: int) -> int:
    """Groups of one shard with those that fill up its last batch."""
    return math.ceil(groups / batch) * batch


def all_computed_groups(plan: BuildPlan) -> int:
    """`computed_groups` of all shards together."""
    full, rest = divmod(plan.num_groups, plan.layout.size)
    batch = plan.config.shards.groups_per_batch
    return full * computed_groups(plan.layout.size, batch) + computed_groups(rest, batch)


def noise_rows(plan: BuildPlan) -> int:
    """Denoiser rows that choose noise for all shards, with what fills up the last batches."""
    padded = plan.config.noise.strategy == "select"
    groups = all_computed_groups(plan) if padded else plan.num_groups
    return noise_cost(plan.config, groups=groups).rows
