"""What a run pins of the datasets that it is trained on, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from semix.calib.batches import Batches
from semix.calib.check import check_config
from semix.calib.real_data import open_data
from semix.calib.run_folder import pin_data
from semix.calib.train import pin_of_mixed
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.flags import flag_series
from semix.data.real import DIGITS
from semix.data.root import Root
from tests import handmade

DIGEST = "cd34" * 16


def relabel(root: Root) -> None:
    """A label set by hand: every image is of its first class."""
    labels = handmade.label_set(root, digest=DIGEST)
    mixed = MixedDataset(root.url)
    groups = [
        handmade.labels_of(group, weights=[0.0, 0.3, 0.7, 1.0], labels=[[[classes[0], 1.0]]] * 4)
        for group, classes in zip(mixed.numbers.tolist(), mixed.classes.tolist(), strict=True)
    ]
    labels.commit(0, images=root.record(0).sha256, groups=groups)


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
            data.images("train"),
            data.train_targets,
            batch_size=20,
            augment=config.augment,
            device=torch.device("cpu"),
            mixed=data.mixed,
            process=process,
            processes=processes,
        )
        return list(batches.epoch(torch.Generator().manual_seed(0)))

    expected, halves = epoch(1, 0, 1), [epoch(0, process, 2) for process in (0, 1)]
    for batch, first, second in zip(expected, *halves, strict=True):
        assert torch.equal(torch.cat([first.mixed_images, second.mixed_images]), batch.mixed_images)
        assert torch.equal(torch.cat([first.mixed_labels, second.mixed_labels]), batch.mixed_labels)


def folder_of(root: Path, **splits: list[int]) -> Path:
    """An image folder of two classes; `splits` gives the colour of each picture."""
    for split, colours in splits.items():
        for index, colour in enumerate(colours):
            path = root / split / ("cat", "dog")[index % 2] / f"{index:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (colour, 0, 0)).save(path)
    return root


def test_splits_that_share_images_are_refused(make_config, tmp_path):
    folder = folder_of(tmp_path, train=[*range(20)], val=[20, 21, 3], test=[22, 23, 21, 24, 24, 5])
    real = "real={name: imagefolder, image_size: 16, path: " + str(folder)
    config = make_config("mixed=null", real + "}")
    first = r"validation .*/val/cat/02\.png is identical to train .*/train/dog/03\.png"
    message = rf"^real\.allow_overlap = 0: 3 images of validation or test are .*, {first}; remove"
    with pytest.raises(InputError, match=message):
        open_data(config)
    with pytest.raises(InputError, match=r"^real\.allow_overlap = 2: 3 images"):
        open_data(make_config("mixed=null", real + ", allow_overlap: 2}"))
    assert len(open_data(make_config("mixed=null", real + ", allow_overlap: 3}")).real.test) == 6
    assert len(open_data(config, compare_splits=False).real.test) == 6


def test_a_mixed_dataset_with_classes_in_another_order_is_refused(make_config, tmp_path):
    names = (*DIGITS[1::-1], *DIGITS[2:])
    sample = handmade.sample(0, side=16)
    url = handmade.root_of(tmp_path / "root", [sample], names).url
    for function in (open_data, check_config):
        with pytest.raises(InputError, match=r"^mixed\.url = .*: its classes are one, zero, two"):
            function(make_config(f"mixed.url={url}"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0, 0.5], [1, 0.4]], r"labels\.0: sums to 0\.9, not 1"),
        ([[0, 0.5], [10, 0.5]], r"a label names class 10, the plan has 10"),
        ([[0, 1.5], [1, -0.5]], r"labels\.0\.0\.1: .*less than or equal to 1"),
        ([[-1, 0.5], [1, 0.5]], r"labels\.0\.0\.0: .*greater than or equal to 0"),
    ],
)
def test_malformed_labels_are_refused_by_name(make_config, tmp_path, labels, message):
    bad = handmade.sample(0, side=16, labels=[labels, labels])
    url = handmade.root_of(tmp_path / "root", [bad], DIGITS).url
    with pytest.raises(InputError, match=rf"^mixed\.url = .*/root: .*shards/0000/.*{message}"):
        open_data(make_config(f"mixed.url={url}"))


def test_a_label_set_with_malformed_labels_is_refused_by_name(make_config, mixed_url, tmp_path):
    root = Root(shutil.copytree(mixed_url, tmp_path / "root").as_posix())
    relabel(root)
    (path,) = (tmp_path / "root" / "labels").rglob("0000000.json")
    path.write_text(path.read_text().replace("1.0]]", "0.8]]"))
    message = r"^mixed\.url = .*labels/cd34.*: sums to 0\.8, not 1"
    with pytest.raises(InputError, match=message):
        open_data(make_config(f"mixed.url={root.url}", "mixed.labels=cd34cd34"))


def test_flags_of_excluded_series_are_pinned(make_config, mixed_url, tmp_path):
    root = Root(shutil.copytree(mixed_url, tmp_path / "root").as_posix())
    flag_series(root, excluded=[1])
    config = make_config(f"mixed.url={root.url}", "mixed.exclude.flagged=[excluded]")
    data = open_data(config)
    assert data.record["mixed"]["flags"] == 1 and 1 not in data.mixed.numbers
    run = tmp_path / "run"
    (run / "seed-0").mkdir(parents=True)
    (run / "data.json").write_text(json.dumps(data.record))
    flag_series(root, excluded=[2])
    pin_data(open_data(config, pin=pin_of_mixed(config, run)).record, run)  # the run goes on
    with pytest.raises(InputError, match=r"data\.json mixed = .*is not what this run began with"):
        pin_data(open_data(config).record, run)
