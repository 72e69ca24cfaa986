"""What a run pins of the mixed dataset that it is trained on."""

import json
import shutil

import pytest
import torch

from calib.batches import Batches
from calib.run_folder import pin_data
from calib.training_data import open_data
from data.errors import InputError
from data.label_sets import create_set
from data.root import Root

DIGEST = "cd34" * 16


def relabel(root: Root) -> None:
    """A label set by hand: every image is of its first class."""
    record = {"schema": 1, "digest": DIGEST, "plan": root.plan["digest"], "features": "root"}
    labels = create_set(root, record | {"annotation": {}, "encoders": {}, "batch": 1})
    mixed_classes = {g["group"]: g["classes"] for g in groups(root)}
    labels.commit(
        0,
        images=root.committed()[0]["sha256"],
        groups=[
            {"group": group, "weights": [0.0, 0.3, 0.7, 1.0], "labels": [[[classes[0], 1.0]]] * 4}
            for group, classes in mixed_classes.items()
        ],
    )


def groups(root: Root) -> list[dict]:
    from data.mixed import MixedDataset

    return MixedDataset(root.url).groups


def test_index_label_set_and_exclusion_are_pinned(make_config, mixed_url, tmp_path):
    root = Root(shutil.copytree(mixed_url, tmp_path / "root").as_posix())
    relabel(root)
    plain = open_data(make_config(f"mixed.url={root.url}"))
    excluding = "mixed.exclude={min_correlation: 0.5, flagged: []}"
    config = make_config(f"mixed.url={root.url}", "mixed.labels=cd34cd34", excluding)
    data = open_data(config)
    pinned = data.record["mixed"]
    assert pinned["index"] == plain.record["mixed"]["index"] == "index/0.json"
    assert (plain.record["mixed"]["labels"], pinned["labels"]) == (None, DIGEST)
    assert pinned["exclude"] == {"min_correlation": 0.5}
    assert torch.equal(data.mixed.labels.argmax(-1), data.mixed.classes[:, :1].expand(-1, 4))
    run = tmp_path / "run"
    (run / "seed-0").mkdir(parents=True)
    (run / "data.json").write_text(json.dumps(data.record))
    pin_data(data.record, run)
    with pytest.raises(InputError, match=r"data\.json mixed = .*is not what this run began with"):
        pin_data(plain.record, run)


def test_processes_read_their_own_mixed_images_alone(make_config):
    """Whether from memory or from the shards, two halves are what one process sees."""

    def epoch(memory_gib: int, process: int, processes: int) -> list:
        config = make_config(f"mixed.memory_gib={memory_gib}")
        data = open_data(config)
        assert data.mixed.in_memory == (memory_gib > 0)
        batches = Batches(
            data.train_images,
            data.train_targets,
            batch_size=20,
            augment=config.augment,
            device=torch.device("cpu"),
            mixed=data.mixed,
            process=process,
            processes=processes,
        )
        return list(batches.epoch(torch.Generator().manual_seed(0)))

    whole, halves = epoch(1, 0, 1), [epoch(0, process, 2) for process in (0, 1)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat([first.mixed_images, second.mixed_images]), batch.mixed_images)
        assert torch.equal(torch.cat([first.mixed_labels, second.mixed_labels]), batch.mixed_labels)
