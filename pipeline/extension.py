"""Add series behind the last one of a root; nothing that is there is renumbered."""

from data.errors import InputError
from data.extension import Extension, next_extension, write_extension
from data.root import Root
from pipeline.root import GROUPS_PER_PAIR, plan_of

MOST_GROUPS = 10**8  # keys in a shard have eight digits


def extend_root(root: Root, groups_per_pair: int) -> Root:
    """Raise the series of each pair to `groups_per_pair`; returns the root as it is then.

    Groups walk the pairs and start again after the last, so more rounds come behind all that
    is there. plan.json stays as it is; `extensions/N.json` says what was added.

    Raises:
        InputError: not more than there is, too many for a root, or another extension came first.
    """
    plan = plan_of(root)
    before = plan.num_groups // plan.num_pairs
    if groups_per_pair <= before:
        remedy = f"{root.url} has {before} already; extending only adds, so give more"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    if groups_per_pair * plan.num_pairs > MOST_GROUPS:
        remedy = f"a root has at most {MOST_GROUPS:,} series; start another with another seed"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    extension = next_extension(plan.digest, plan.layout, groups_per_pair, plan.num_pairs)
    number = len(root.extensions) + 1
    if not write_extension(root.store, number, extension):
        now = Root(root.url).extensions[-1].groups_per_pair
        remedy = f"someone else extended {root.url} to {now} meanwhile; look at it and try again"
        raise InputError(GROUPS_PER_PAIR, groups_per_pair, remedy)
    return Root(root.url)


def described(extension: Extension) -> str:
    """`groups 45 to 89, shards 8 to 15`."""
    added = extension.stretch
    groups = f"groups {added.first_group} to {added.last_group}"
    return f"{groups}, shards {added.first_shard} to {added.last_shard}"
