"""What a build makes: every group and shard as a pure function of the config and an index."""

from pipeline.plan.build_plan import BuildPlan, MixGroup, ShardSpec, group_seed

__all__ = ["BuildPlan", "MixGroup", "ShardSpec", "group_seed"]
