"""CLIP features of real images: encoded once, even if a process is killed, and measured."""

import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES
from semix.data.machine import cache_folder
from semix.data.real import ImageSplit, RealDataConfig, load_real
from semix.data.settings import load_settings
from semix.data.store import Store
from semix.pipeline import prototype_measurement
from semix.pipeline.annotate import class_prototypes
from semix.pipeline.clip import ClipEncoder
from semix.pipeline.config import AnnotationConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prototype_measurement import FeatureChunks, similar_pairs
from semix.pipeline.prototype_statistics import (
    Measurement,
    WeightVariance,
    coinciding,
    measure_features,
)
from semix.pipeline.prototypes import ensure_prototypes, measure, read_prototypes, unpack
from semix.pipeline.provenance import annotation_identity
from tests.pipeline.roots import altered, begun, create_root


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_of(config: AnnotationConfig) -> Path:
    return Path(config.model.removeprefix("local-dir:"))


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """How many images each call of CLIP encoded."""
    counts: list[int] = []
    original = ClipEncoder.encode

    def counting(self, images):
        counts.append(len(images))
        return original(self, images)

    monkeypatch.setattr(ClipEncoder, "encode", counting)
    return counts


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(prototype_measurement, "BATCH", 32)
    monkeypatch.setattr(prototype_measurement, "CHUNK", 64)


def test_a_second_root_measures_nothing(hasty_config, tmp_path, cache, encoded):
    roots = [create_root(hasty_config, str(tmp_path / name)) for name in ("one", "two")]
    ensure_prototypes(build_of(roots[0]), device="cpu")
    assert sum(encoded) == 300
    ensure_prototypes(build_of(roots[0]), device="cpu")
    ensure_prototypes(build_of(roots[1]), device="cpu")
    assert sum(encoded) == 300
    assert roots[0].store.get(PROTOTYPES) == roots[1].store.get(PROTOTYPES)
    assert roots[0].store.list("prototypes") == []
    assert len(list(cache.glob("prototypes-*"))) == 1


def test_the_cache_goes_by_content_not_by_place(hasty_config, tmp_path, cache, encoded):
    begun(hasty_config, tmp_path / "one")
    shutil.copytree(folder_of(hasty_config.annotation), tmp_path / "moved")
    moved = f"annotation.model=local-dir:{tmp_path / 'moved'}"
    begun(altered(hasty_config, moved, "annotation.scale=3", "mixing.seed=9"), tmp_path / "two")
    assert sum(encoded) == 300
    begun(altered(hasty_config, "real.split_seed=1"), tmp_path / "three")  # other images
    assert sum(encoded) == 600
    settings = tmp_path / "moved" / "open_clip_config.json"
    settings.write_text(settings.read_text() + "\n")  # another encoder, for all we know
    begun(altered(hasty_config, moved), tmp_path / "four")
    assert sum(encoded) == 900
    begun(altered(hasty_config, moved, "annotation.dtype=bfloat16"), tmp_path / "five")
    assert sum(encoded) == 1200


@pytest.mark.parametrize("damage", [lambda c: c[:100], lambda c: c[:-1] + bytes([c[-1] ^ 1])])
def test_a_damaged_cache_is_measured_again(hasty_config, tmp_path, cache, encoded, caplog, damage):
    roots = [create_root(hasty_config, str(tmp_path / name)) for name in ("one", "two")]
    ensure_prototypes(build_of(roots[0]), device="cpu")
    (file,) = cache.glob("prototypes-*")
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING, logger="semix.build"):
        ensure_prototypes(build_of(roots[1]), device="cpu")
    assert f"{file} is not used, and measured again" in caplog.text
    assert sum(encoded) == 600
    assert roots[0].store.get(PROTOTYPES) == roots[1].store.get(PROTOTYPES)


def test_a_cache_that_cannot_be_written_is_worth_a_warning(
    hasty_config, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="semix.build"):
        root = begun(hasty_config, tmp_path / "root")
    assert "prototypes are not cached" in caplog.text
    assert read_prototypes(root)[0].shape[0] == 10


def test_without_a_setting_the_cache_is_in_the_home_folder(monkeypatch):
    monkeypatch.delenv("SEMIX_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/semix")


KILLED = """
import os, sys
from semix.data.root import Root
from semix.pipeline.plan import build_of
from semix.data.store import Store
from semix.pipeline import prototype_measurement
from semix.pipeline.prototypes import ensure_prototypes

prototype_measurement.BATCH, prototype_measurement.CHUNK = 32, 64
create, made = Store.create, []

def killed_after_two(self, name, content):
    done = create(self, name, content)
    made.append(name)
    if len(made) == 2:
        os._exit(9)
    return done

Store.create = killed_after_two
ensure_prototypes(build_of(Root(sys.argv[1])), device="cpu")
"""


@pytest.mark.process
def test_a_killed_measurement_goes_on_with_the_next_chunk(
    hasty_config, tmp_path, cache, encoded, small_chunks, monkeypatch
):
    root = create_root(hasty_config, str(tmp_path / "killed"))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.run([sys.executable, script, root.url], env=os.environ | paths)
    assert process.returncode == 9
    assert len(root.store.list("prototypes")) == 2
    assert not root.store.exists(PROTOTYPES)
    ensure_prototypes(build_of(root), device="cpu")
    assert encoded == [32] * 5 + [12]  # 172 of 300: 128 were there
    assert root.store.list("prototypes") == []
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "another"))
    unbroken = begun(hasty_config, tmp_path / "unbroken")
    assert sum(encoded) == 472
    assert root.store.get(PROTOTYPES) == unbroken.store.get(PROTOTYPES)


def split_of(count: int, store: str, folder: str = "chunks") -> FeatureChunks:
    """Chunks whose features are the mean colours of random images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    split = ImageSplit(np.arange(count) % 2, load=lambda i: images[i], content=lambda _: "")
    return FeatureChunks(
        split, lambda x: x.float().mean((1, 2)), Store(store), folder, size=10, batch=4
    )


def test_chunks_are_read_back_in_order_and_made_again_where_damaged(tmp_path):
    chunks = split_of(25, str(tmp_path))
    first = [features for features, _ in chunks]
    assert [len(features) for features in first] == [10, 10, 5]
    assert torch.equal(torch.cat([targets for _, targets in chunks]), torch.arange(25) % 2)
    damaged = tmp_path / "chunks" / "0000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    (tmp_path / "chunks" / "0000002.safetensors").unlink()  # by another process that finished
    again = [features for features, _ in chunks]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    # A chunk under another's name is not taken for it.
    shutil.copy(tmp_path / "chunks" / "0000000.safetensors", damaged)
    assert torch.equal(list(chunks)[1][0], first[1])


def test_a_feature_that_is_not_a_number_is_named(tmp_path):
    chunks = split_of(25, str(tmp_path))

    def encode(images):
        features = images.float().mean((1, 2))
        features[0] = float("nan") if len(images) < 4 else features[0]
        return features

    broken = FeatureChunks(chunks.split, encode, chunks.store, "nan", size=10, batch=4)
    with pytest.raises(FloatingPointError, match="training image 8, of class 0: its CLIP features"):
        list(broken)
    assert chunks.store.list("nan") == []


def pictures(folder: Path, *, same: bool) -> RealDataConfig:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 4, 16, 16, 3), dtype=np.uint8)
    if same:
        pixels[2] = pixels[0]
    for name, images in zip(("ant", "bee", "cat"), pixels, strict=True):
        for split in ("train", "test", "validation"):
            (folder / split / name).mkdir(parents=True)
            for index, image in enumerate(images):
                Image.fromarray(image).save(folder / split / name / f"{index}.png")
    return RealDataConfig(name="imagefolder", path=str(folder), image_size=32)


def measured_for(config, real, store, **more) -> bytes:
    identity = annotation_identity(config)
    return measure(config, real, device="cpu", identity=identity, store=Store(str(store)), **more)


def test_classes_that_clip_cannot_tell_apart_are_named(hasty_config, tmp_path):
    real = pictures(tmp_path / "pictures", same=True)
    with pytest.raises(InputError, match=r"real = classes 'ant' and 'cat': have one CLIP prototy"):
        measured_for(hasty_config.annotation, real, tmp_path)


def test_a_class_without_training_images_is_named(hasty_config, tmp_path, monkeypatch):
    real = load_real(RealDataConfig(name="digits"))
    mask = real.train.targets != 3
    train = ImageSplit(real.train.targets[mask], real.train.load, real.train.content)
    lacking = type(real)(real.class_names, train, real.validation, real.test)
    monkeypatch.setattr(prototype_measurement, "load_real", lambda config, **_: lacking)
    with pytest.raises(InputError, match="real = class 'three': has no training images; add some"):
        measured_for(hasty_config.annotation, RealDataConfig(name="digits"), tmp_path)


def test_what_is_known_needs_neither_images_nor_clip(hasty_config, tmp_path, encoded):
    shutil.copytree(folder_of(hasty_config.annotation), tmp_path / "clip")
    real = pictures(tmp_path / "pictures", same=False)
    values = {"model": f"local-dir:{tmp_path / 'clip'}"}
    config = load_settings(type(hasty_config.annotation), values)
    earlier = measured_for(config, real, tmp_path)
    identity, count = annotation_identity(config), len(encoded)
    shutil.rmtree(tmp_path / "clip")
    shutil.rmtree(tmp_path / "pictures")
    changed = load_settings(type(config), values | {"scale": 3.0, "normalize": True})
    content = measure(
        changed, real, device="cpu", identity=identity, store=Store(str(tmp_path)), known=earlier
    )
    tensors, facts = unpack(content)
    assert len(encoded) == count
    assert facts["scale"] == "3.0"
    assert torch.equal(tensors["prototypes"], unpack(earlier)[0]["prototypes"])


def test_images_that_changed_since_are_refused(hasty_config, tmp_path):
    real = pictures(tmp_path / "pictures", same=False)
    earlier = measured_for(hasty_config.annotation, real, tmp_path)
    (tmp_path / "pictures" / "train" / "ant" / "0.png").unlink()
    tag = ("annotation.model=ViT-B-32-quickgelu", "annotation.pretrained=openai")
    other = altered(hasty_config, *tag).annotation
    with pytest.raises(InputError, match=r"real = .*pictures: its images changed since"):
        measured_for(other, real, tmp_path, known=earlier)


def test_the_dial_is_printed(hasty_config, tmp_path, caplog):
    config = hasty_config.annotation
    with caplog.at_level(logging.INFO, logger="semix.build"):
        content = measured_for(config, RealDataConfig(name="digits"), tmp_path)
    facts = unpack(content)[1]
    scale = float(facts["scale"])
    assert scale == pytest.approx(min(max(1 / float(facts["weight_variance"]), 1), 20))
    label = float(facts["label_of_average_real_image"])
    assert label == pytest.approx(1 / (1 + np.exp(-scale / 2)))
    assert (
        f"scale {scale:.3g} (from the spread of real images); an average real image would be "
        f"labelled {label:.3f}"
    ) in caplog.text
    assert json.loads(facts["class_names"])[3] == "three"


@pytest.mark.parametrize(("scale", "label"), [(0.5, "0.562"), (3.4, None), (10.0, "0.993")])
def test_a_dial_as_set_is_printed_where_it_is_unusual(hasty_config, tmp_path, caplog, scale, label):
    config = hasty_config.annotation.model_copy(update={"scale": scale})
    with caplog.at_level(logging.INFO, logger="semix.build"):
        content = measured_for(config, RealDataConfig(name="digits"), tmp_path)
    message = f"(as set); an average real image would be labelled {label}"
    assert (message in caplog.text) == ("would be labelled" in caplog.text) == (label is not None)
    assert float(unpack(content)[1]["scale"]) == scale


def test_whoever_watches_hears_of_each_batch(hasty_config, tmp_path, cache, small_chunks):
    heartbeats: list[int] = []
    root = create_root(hasty_config, str(tmp_path / "root"))
    ensure_prototypes(build_of(root), device="cpu", heartbeat=lambda: heartbeats.append(1))
    assert len(heartbeats) == 10  # 300 images in chunks of 64, batches of 32


def test_similar_pairs_follow_the_cosine():
    angles = torch.tensor([0.0, 0.1, 1.5, 1.6, 3.0])
    prototypes = torch.stack([angles.cos(), angles.sin()], 1)
    closest = similar_pairs(prototypes, 2, temperature=1e-3, seed=0)
    assert closest == [(0, 1), (2, 3)]
    anything = {tuple(similar_pairs(prototypes, 1, temperature=1e3, seed=s)) for s in range(60)}
    assert len(anything) > 6  # of ten, nearly uniform
    assert similar_pairs(prototypes, 10, temperature=0.1, seed=3) == list(
        itertools.combinations(range(5), 2)
    )


def test_odds_of_similar_pairs_are_those_of_the_softmax():
    prototypes = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])  # cosines 0.8, 0, 0.6
    draws = [similar_pairs(prototypes, 1, temperature=0.5, seed=s)[0] for s in range(2000)]
    odds = [math.exp(c / 0.5) for c in (0.8, 0.0, 0.6)]
    for pair, weight in zip([(0, 1), (0, 2), (1, 2)], odds, strict=True):
        assert draws.count(pair) / 2000 == pytest.approx(weight / sum(odds), abs=0.04)


CLASSES, WIDTH = 5, 7


def real_features(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (count,), generator=rng)
    centres = 1 + torch.randn(CLASSES, WIDTH, generator=rng)
    return centres[targets] + torch.randn(count, WIDTH, generator=rng), targets


def in_batches(features, targets, size=23):
    return list(zip(features.split(size), targets.split(size), strict=True))


def numpy_variance(features, targets, means, prototypes) -> float:
    """The definition in plain loops: each real image, on the line to each other class."""
    squares = []
    for feature, own in zip(features, targets, strict=True):
        for other in range(len(prototypes)):
            if other != own:
                axis = prototypes[own] - prototypes[other]
                squares.append(((feature - means[own]) @ axis / (axis @ axis)) ** 2)
    return float(np.mean(squares))


def test_a_stream_measures_what_all_features_at_once_say():
    features, targets = real_features()
    measurement = measure_features(in_batches(features, targets), CLASSES)
    assert torch.equal(measurement.prototypes, class_prototypes(features, targets, CLASSES))
    f, t = features.double().numpy(), targets.numpy()
    means = np.stack([f[t == k].mean(0) for k in range(CLASSES)])
    np.testing.assert_allclose(measurement.prototypes, means, rtol=1e-6)
    assert measurement.variance == pytest.approx(numpy_variance(f, t, means, means), rel=1e-5)


def test_unit_features_have_prototypes_and_a_spread_of_their_own():
    features, targets = real_features()
    measurement = measure_features(in_batches(features, targets), CLASSES)
    f = features.double().numpy()
    f, t = f / np.linalg.norm(f, axis=1, keepdims=True), targets.numpy()
    means = np.stack([f[t == k].mean(0) for k in range(CLASSES)])
    units = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(measurement.unit, units, rtol=1e-5)
    assert measurement.unit_variance == pytest.approx(numpy_variance(f, t, means, units), rel=1e-5)
    assert measurement.scale("auto") != measurement.scale("auto", normalize=True)


def test_order_and_batches_do_not_show():
    features, targets = real_features()
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(1))
    one = measure_features(in_batches(features, targets), CLASSES)
    other = measure_features(in_batches(features[order], targets[order], 64), CLASSES)
    assert torch.equal(one.prototypes, other.prototypes)
    assert one.variance == pytest.approx(other.variance, rel=1e-12)


def test_prototypes_that_coincide_are_found_and_have_no_spread():
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1e-6]])
    assert coinciding(vectors) == (0, 2)
    assert coinciding(vectors[:2]) is None
    spread = WeightVariance(vectors, vectors)
    spread.add(vectors + 0.1, torch.tensor([0, 1, 2]))
    assert spread.value() == float("inf")


@pytest.mark.process
def test_memory_does_not_grow_with_the_images(tmp_path):
    """60,000 features of 512 numbers would be 120 MB; they pass through a few."""
    script = tmp_path / "stream.py"
    script.write_text(
        """
import sys
import numpy as np, psutil, torch
from semix.data.real import ImageSplit
from semix.data.store import Store
from semix.pipeline.prototype_statistics import measure_features
from semix.pipeline.prototype_measurement import FeatureChunks

matrix = torch.randn(192, 512, generator=torch.Generator().manual_seed(0))

def run(count, folder):
    split = ImageSplit(
        np.arange(count) % 10,
        load=lambda i: np.random.default_rng(int(i[0])).integers(
            0, 256, (len(i), 8, 8, 3), dtype=np.uint8
        ),
        content=lambda _: "",
    )
    rss = []  # MB of this process after each batch; the system's peak includes its parent's

    def encode(images):
        rss.append(psutil.Process().memory_info().rss / 1e6)
        return images.flatten(1).float() @ matrix

    chunks = FeatureChunks(split, encode, Store(sys.argv[1]), folder, size=1024, batch=256)
    measure_features(chunks, 10)
    return max(rss)

small = run(4_000, "small")
print(run(60_000, "large") - small)
"""
    )
    result = subprocess.run(
        [sys.executable, script, tmp_path / "store"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 40  # MB
    assert len(Store(str(tmp_path / "store")).list("large")) == 59


def test_automatic_scale_is_the_inverse_variance_within_bounds():
    def scale(variance: float, configured: float | str = "auto") -> float:
        return Measurement(torch.zeros(2, 1), torch.zeros(2, 1), variance, 0.5).scale(configured)

    assert scale(0.125) == 8.0
    assert scale(1e-9) == 20.0
    assert scale(0.0) == 20.0
    assert scale(100.0) == 1.0
    assert scale(math.inf) == 1.0
    assert scale(0.125, 2.3) == 2.3
    measurement = Measurement(torch.zeros(2, 1), torch.zeros(2, 1), 0.125, 0.5)
    assert measurement.scale("auto", normalize=True) == 2.0
