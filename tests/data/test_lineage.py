"""Lineage: which shards a build made, and which shards, plan and models a run read."""

from semix.data.lineage import describe_source, made_and_reused, read_shards, source
from semix.data.pinned import PinnedRoot


def test_what_a_build_made_and_what_it_found():
    shards = made_and_reused(before={0, 1, 4}, after=[0, 1, 2, 3, 4])
    assert shards == {"made": "2-3", "reused": "0-1,4"}
    assert made_and_reused([], []) == {"made": "", "reused": ""}


def test_every_shard_of_an_index_is_listed_with_its_hash(root):

    index = root.write_index()
    pinned = PinnedRoot(root, index=index)
    lineage = read_shards(root, pinned.pinned, url=root.url)
    entries = list(root.records())
    assert lineage["shards"] == [(entry.shard, entry.sha256) for entry in entries]
    assert lineage["prototypes"] == entries[0].prototypes
    assert (lineage["plan"], lineage["index"]) == (root.plan.digest, index)


def test_a_source_in_words_names_plan_and_models(root):
    plan = root.plan
    baked = plan.model_copy(
        update={
            "models": {"generator": {"model": "sd", "files": {"a": "1"}}},
            "baked_from": {"plan": "f" * 64, "labels": "0"},
        }
    )
    text = describe_source(source(baked))
    assert text.startswith(f"plan {plan.digest[:12]}; generator sd ")
    assert text.endswith(f"; baked from {'f' * 12}")
    changed = baked.model_copy(update={"models": {"generator": {"model": "sd", "files": {}}}})
    assert describe_source(source(changed)) != text
