"""Datasets for `datasets`: folders of parquet, of pictures, and those that it has saved."""

from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from semix.data.errors import InputError
from semix.data.real import class_names, load_real
from semix.data.splits import RealDataConfig
from tests.data.benchmark_files import PER_CLASS, TARGETS, pixels

NAMES = ["ant", "bee", "cat"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def part(name: str, **columns) -> datasets.Dataset:
    images = [Image.fromarray(image) for image in pixels(name, 32, 32, 3)]
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=NAMES),
            "weight": datasets.Value("float32"),
        }
    )
    values = {"picture": images, "kind": TARGETS, "weight": [1.0] * len(TARGETS), **columns}
    return datasets.Dataset.from_dict(values, features=features)


@pytest.fixture
def saved(tmp_path) -> Path:
    parts = datasets.DatasetDict({"train": part("train"), "test": part("test")})
    parts.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def parquet(tmp_path) -> Path:
    folder = tmp_path / "parquet"
    (folder / "data").mkdir(parents=True)
    for name in ("train", "test"):
        part(name).to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    return folder


def config(folder: Path, **settings) -> RealDataConfig:
    return RealDataConfig(name="huggingface", path=str(folder), **settings)


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_a_folder_is_read_with_its_own_classes_and_parts(request, kind):
    settings = config(request.getfixturevalue(kind))
    real = load_real(settings)
    assert class_names(settings) == real.class_names == tuple(NAMES)
    assert np.array_equal(real.test.images(), pixels("test", 32, 32, 3))
    counts = [np.bincount(split.targets).tolist() for split in (real.train, real.validation)]
    assert counts == [[PER_CLASS - 1] * 3, [1] * 3]
    assert np.array_equal(real.test.targets, TARGETS)
    assert len({real.train.digest, real.validation.digest, real.test.digest}) == 3
    assert load_real(settings).train.digest == real.train.digest


def test_a_folder_of_pictures_is_read_as_datasets_reads_it(tmp_path):
    for name in ("train", "test"):
        for number, (target, image) in enumerate(
            zip(TARGETS, pixels(name, 32, 32, 3), strict=True)
        ):
            path = tmp_path / "pictures" / name / NAMES[target] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    real = load_real(config(tmp_path / "pictures"))
    assert real.class_names == tuple(NAMES)
    assert np.bincount(real.test.targets).tolist() == [PER_CLASS] * 3
    stored = {image.tobytes() for image in pixels("test", 32, 32, 3)}
    assert {image.tobytes() for image in real.test.images()} == stored


def test_columns_are_named_or_the_only_ones_of_their_type(saved):
    named = load_real(config(saved, image="picture", label="kind"))
    assert named.train.digest == load_real(config(saved)).train.digest


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"image": "photo"}, r"real\.image = photo: name a column of type Image; there are pic"),
        ({"image": "kind"}, r"real\.image = kind: is of type ClassLabel, not Image"),
        ({"label": "weight"}, r"real\.label = weight: is of type Value, not ClassLabel"),
    ],
)
def test_columns_of_other_types_are_refused(saved, settings, text):
    with pytest.raises(InputError, match=text):
        class_names(config(saved, **settings))


def test_parts_that_are_missing_or_differ_are_named(tmp_path):
    datasets.DatasetDict({"train": part("train")}).save_to_disk(tmp_path / "one")
    with pytest.raises(InputError, match="has train; train and one of test, validation, val"):
        load_real(config(tmp_path / "one"))
    other = part("test").cast_column("kind", datasets.ClassLabel(names=NAMES[::-1]))
    both = datasets.DatasetDict({"train": part("train"), "test": other})
    both.save_to_disk(tmp_path / "other")
    with pytest.raises(InputError, match="test has other columns or classes than train"):
        load_real(config(tmp_path / "other"))


@pytest.mark.parametrize("revision", [None, "main", "v1"])
def test_a_dataset_on_the_hub_needs_its_commit(revision):
    settings = RealDataConfig(name="huggingface", path="me/birds", revision=revision)
    with pytest.raises(InputError, match=r"real\.revision = \w+: me/birds is no folder here"):
        load_real(settings)


def test_a_dataset_that_cannot_be_fetched_is_named(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    settings = RealDataConfig(name="huggingface", path="me/birds", revision="0" * 40)
    with pytest.raises(InputError, match=r"real\.path = me/birds: `datasets` cannot read it"):
        load_real(settings)


def test_damage_is_named(saved, parquet):
    (saved / "train" / "state.json").unlink()
    with pytest.raises(InputError, match=r"real\.path = .*`datasets` cannot read it"):
        load_real(config(saved))
    (path,) = (parquet / "data").glob("train*")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"real\.path = .*`datasets` cannot read it"):
        load_real(config(parquet))


def test_a_picture_that_cannot_be_decoded_is_named_when_it_is_read(tmp_path):
    pictures = [{"bytes": b"no picture", "path": None}] * len(TARGETS)
    parts = {"train": part("train"), "test": part("test", picture=pictures)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "bad")
    real = load_real(config(tmp_path / "bad"))
    with pytest.raises(InputError, match=r"image = row 1 of picture: cannot be read \("):
        real.test.images([1])


def test_settings_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="`name: digits` has no `revision`; leave it out"):
        RealDataConfig(name="digits", revision="0" * 40)
