"""Further labels for existing images: from stored features, from images, by many workers."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from scipy.special import expit
from torch import Tensor

from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES
from semix.data.label_sets import LabelSet, label_sets
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.pipeline.annotate import build_annotator
from semix.pipeline.config import AnnotationConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import read_prototypes, unpack
from semix.pipeline.relabel import (
    IMAGES,
    ROOT,
    ensure_set_prototypes,
    is_own,
    label_stored,
    plan_set,
    relabelled_config,
)
from semix.pipeline.worker import SOME_FAILED
from tests.handmade import committed
from tests.pipeline.roots import (
    altered,
    begin_set,
    by_group,
    contents,
    create_root,
    features,
    made,
    plan_of,
    relabel,
    samples,
    work,
)

CHECKOUT = Path(__file__).parents[2]


def own_features(labels: LabelSet, shard: int) -> dict[str, Tensor]:
    """The features that the label set stores itself."""
    return load(labels.store.get(dict(labels.headers())[shard].features.name))


def test_another_sharpening_comes_from_stored_features(root):
    labels = relabel(root, "scale=4.0")
    assert labels.missing() == []
    assert labels.record.features == ROOT
    labelled, stored = by_group(labels), samples(root)
    assert sorted(labelled) == sorted(stored) == list(range(45))
    for group, sample in stored.items():
        weights = torch.tensor(labelled[group].weights)
        expected = torch.tensor(sample.record.weights)
        torch.testing.assert_close(weights, expected, atol=0.02, rtol=0.02)
        for weight, label in zip(labelled[group].weights, labelled[group].labels, strict=True):
            assert [k for k, _ in label] == sample.record.classes
            assert label[0][1] == pytest.approx(expit(4.0 * (weight - 0.5)), abs=1e-6)


def test_stored_features_need_no_clip_and_no_images(root, hasty_standins, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("CLIP was loaded, or an image decoded")

    monkeypatch.setattr("open_clip.create_model_and_transforms", refuse)
    monkeypatch.setattr("open_clip.create_model", refuse)
    monkeypatch.setattr("semix.data.images.decode_image", refuse)
    labels = relabel(root, "scale=2.0")
    assert labels.missing() == []
    assert labels.failures() == {}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (("rule=similarity", "temperature=0.1"), 10),
        (("rule=mixing_ratio",), 2),
        (("rule=simplex",), 2),
        (("normalize=true",), 2),
    ],
)
def test_every_rule_labels_stored_features(root, rule, expected):
    labels = relabel(root, *rule)
    assert labels.missing() == []
    plan = plan_of(root)
    for group, series in by_group(labels).items():
        for label in series.labels:
            assert len(label) == expected
            assert sum(p for _, p in label) == pytest.approx(1, abs=1e-5)
        if "mixing_ratio" in rule[0]:
            planned = plan.group(group)
            points = [list(zip(planned.classes, point, strict=True)) for point in planned.mixture]
            assert series.labels == points


def test_the_same_clip_from_images_gives_the_weights_of_the_build(root, hasty_standins, tmp_path):
    """With other bytes it counts as another encoder, so the images are read again."""
    shutil.copytree(hasty_standins.clip, tmp_path / "copy")
    moved = f"annotation.model=local-dir:{tmp_path / 'copy'}"
    assert is_own(root, relabelled_config(root, [moved]))
    settings = tmp_path / "copy" / "open_clip_config.json"
    settings.write_text(settings.read_text() + "\n")
    labels = relabel(root, f"model=local-dir:{tmp_path / 'copy'}")
    assert labels.record.features == IMAGES
    new = by_group(labels)
    assert sorted(new) == list(range(45))
    for group, sample in samples(root).items():
        actual, expected = (torch.tensor(w) for w in (new[group].weights, sample.record.weights))
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for shard, header in dict(labels.headers()).items():
        both = own_features(labels, shard), features(root, shard)
        actual, expected = (tensors["features"].float() for tensors in both)
        torch.testing.assert_close(actual, expected, atol=5e-3, rtol=5e-3)
        content = root.store.get(header.features.name)
        assert header.features.sha256 == hashlib.sha256(content).hexdigest()
        assert header.features.bytes == len(content)


def test_another_clip_gives_other_weights_and_its_features_serve_the_next_set(
    root, other_clip, tmp_path, monkeypatch
):
    clip = tmp_path / "clip"
    shutil.copytree(other_clip, clip)
    first = relabel(root, f"model=local-dir:{clip}")
    weights = by_group(first)[0].weights
    assert weights != pytest.approx(samples(root)[0].record.weights, abs=1e-3)
    monkeypatch.setattr("semix.pipeline.clip.ClipEncoder", None)  # none is loaded
    second = relabel(root, f"model=local-dir:{clip}", "scale=3.0")
    assert second.record.features == first.digest
    assert by_group(second)[0].weights == pytest.approx(weights, abs=0.02)
    assert not [n for n in contents(root, second.folder) if n.endswith(".features.safetensors")]
    assert len(label_sets(root)) == 2


def test_features_of_another_precision_are_other_features(root):
    labels = relabel(root, "dtype=bfloat16")
    assert labels.record.features == IMAGES
    tensors, facts = unpack(root.store.get(labels.prototypes))
    assert json.loads(facts["encoder"])["dtype"] == "bfloat16"
    exact, _ = read_prototypes(root)
    assert 0 < (tensors["prototypes"] - exact).abs().max() < 0.05 * exact.abs().max()


def test_another_clip_at_the_same_place_is_another_set(root, other_clip, tmp_path):
    clip = tmp_path / "clip"
    shutil.copytree(other_clip, clip)
    config = relabelled_config(root, [f"annotation.model=local-dir:{clip}"])
    first = plan_set(root, config)
    file = clip / "open_clip_model.safetensors"
    weights = load_file(file)
    weights["visual.proj"] = -weights["visual.proj"]
    save_file(weights, file)
    assert plan_set(root, config).digest != first.digest
    # What was started with the old file is not continued with this one.
    assert work(root, "--labels", first.digest) == 78


def test_a_second_encoder_that_the_root_lacks_is_read_from_images(root, other_clip):
    labels = relabel(root, f"second.model=local-dir:{other_clip}")
    assert labels.record.features == IMAGES
    assert len(by_group(labels)[7].agreement.difference) == 4
    assert sorted(own_features(labels, 0)) == ["features", "second"]


def test_labels_are_the_same_bytes_wherever_they_are_made(root, built, other_clip, tmp_path):
    shutil.copytree(built.url, tmp_path / "twin")
    twin = Root(str(tmp_path / "twin"))
    for overrides in (("scale=4.0",), (f"model=local-dir:{other_clip}",)):
        first, second = relabel(root, *overrides), relabel(twin, *overrides)
        assert contents(root, first.folder) == contents(twin, second.folder)


@pytest.fixture
def unbroken(built, other_clip, tmp_path) -> dict[str, bytes]:
    """All files of a set by another CLIP that one worker made."""
    shutil.copytree(built.url, tmp_path / "twin")
    twin = Root(str(tmp_path / "twin"))
    return contents(twin, relabel(twin, f"model=local-dir:{other_clip}").folder)


def start_worker(root: Root, labels: LabelSet, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "semix.pipeline.worker", root.url, "--labels", labels.digest]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    }
    return subprocess.Popen([*command, "--device", "cpu", *more], env=environment)


@pytest.mark.process
def test_a_killed_worker_is_continued_and_ends_as_an_unbroken_one(root, unbroken, other_clip):
    labels = begin_set(root, f"model=local-dir:{other_clip}")
    process = start_worker(root, labels)
    deadline = time.monotonic() + 120
    while not dict(labels.headers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = dict(labels.headers())
    assert before
    assert work(root, "--labels", labels.digest) == 0
    assert {shard: dict(labels.headers())[shard] for shard in before} == before
    assert contents(root, labels.folder) == unbroken
    assert labels.failures() == {}


@pytest.mark.process
def test_two_workers_share_a_set_without_losing_a_shard(root, unbroken, other_clip):
    labels = begin_set(root, f"model=local-dir:{other_clip}")
    pair = [start_worker(root, labels, f"--slot={slot}", "--slots=2") for slot in range(2)]
    assert [process.wait(120) for process in pair] == [0, 0]
    assert contents(root, labels.folder) == unbroken
    assert root.store.list("leases") == []


def test_only_committed_images_are_labelled_and_the_rest_later(root):
    root.discard(2)
    root.discard(5)
    labels = relabel(root, "scale=4.0")
    assert labels.done() == [0, 1, 3, 4, 6, 7]
    assert work(root) == 0
    assert labels.missing() == [2, 5]
    label_stored(labels, labels.missing(), plan=build_of(labels.root).plan)
    assert labels.missing() == []


def test_damaged_features_and_images_are_named_and_stop_no_other_shard(root, other_clip):
    entries = committed(root)
    name = entries[1].features.name
    content = root.store.get(name)
    root.store.put(name, content[:-1] + bytes([content[-1] ^ 1]))
    root.store.delete(entries[2].features.name)
    labels = relabel(root, "scale=4.0")
    assert labels.missing() == [1, 2]
    assert {shard: tries[0].message for shard, tries in labels.failures().items()} == {
        1: f"{name}: does not have the recorded SHA-256",
        2: f"{entries[2].features.name}: the shard's features are not there",
    }
    tar = bytearray(root.store.get(entries[3].tar))
    tar[600] ^= 1
    root.store.put(entries[3].tar, bytes(tar))
    image_labels = begin_set(root, f"model=local-dir:{other_clip}")
    assert work(root, "--labels", image_labels.digest) == SOME_FAILED
    assert image_labels.missing() == [3]
    failure = image_labels.failures()[3][0]
    assert failure.message.startswith(f"{entries[3].tar}: group 18, image 0: not a complete")
    assert failure.group == 18


def test_other_bytes_than_recorded_are_never_labelled(root, other_clip):
    """Pixels that decode well but are not the committed ones."""
    entries = committed(root)
    root.store.put(entries[7].tar, root.store.get(entries[6].tar))
    labels = begin_set(root, f"model=local-dir:{other_clip}")
    assert work(root, "--labels", labels.digest) == SOME_FAILED
    assert labels.missing() == [7]


def test_features_that_cannot_be_stored_fail_their_shard_by_name(root, other_clip, monkeypatch):
    """The images are committed: a label set can leave none of them out."""
    from semix.pipeline.clip import ClipEncoder

    labels, encode = begin_set(root, f"model=local-dir:{other_clip}"), ClipEncoder.encode

    def overflowing(self, images):
        output = encode(self, images).clone()
        output[9] = 1e6  # a number, but none that float16 has
        return output

    monkeypatch.setattr(ClipEncoder, "encode", overflowing)
    assert work(root, "--labels", labels.digest, "--shards", "1") == SOME_FAILED
    (failure,) = labels.failures()[1]
    assert failure.message.startswith("group 8: the CLIP features of image 1 are not finite, or")


def test_nothing_differs_from_the_roots_own_labels(root, other_clip):
    scale = root.plan.config["annotation"]["scale"]
    changed = {
        "scale=3": False,
        f"scale={scale}": True,
        f"model=local-dir:{other_clip}": False,
    }
    assert is_own(root, relabelled_config(root, []))
    for change, expected in changed.items():
        assert is_own(root, relabelled_config(root, [f"annotation.{change}"])) is expected


def test_an_encoder_whose_files_are_elsewhere_is_the_roots_own(
    hasty_config, hasty_standins, tmp_path
):
    clip = tmp_path / "clip"
    shutil.copytree(hasty_standins.clip, clip)
    few = ("mixing.pairs={kind: sampled, count: 6}", f"annotation.model=local-dir:{clip}")
    root = made(altered(hasty_config, *few), tmp_path / "root")
    clip.rename(tmp_path / "gone")
    assert is_own(root, relabelled_config(root, []))
    labels = relabel(root, "scale=4.0")
    assert (labels.record.features, labels.missing()) == (ROOT, [])


def test_only_the_annotation_can_change(root):
    with pytest.raises(InputError, match=r"--set = mixing\.seed=7: the images are made; only"):
        relabelled_config(root, ["mixing.seed=7"])
    with pytest.raises(InputError, match=r"annotation\.scale"):
        relabelled_config(root, ["annotation.scale=-1"])


def test_prototypes_of_a_set_are_measured_once(root, other_clip):
    labels = begin_set(root, f"model=local-dir:{other_clip}")
    before = root.store.get(labels.prototypes)
    ensure_set_prototypes(labels, device="cpu")
    assert root.store.get(labels.prototypes) == before
    assert before != root.store.get(PROTOTYPES)
    config = load_settings(AnnotationConfig, labels.record.annotation)
    assert build_annotator(config, before, device="cpu").config == config


def test_settings_of_another_rule_or_model_fall_back(hasty_config, tmp_path):
    config = altered(hasty_config, "annotation.scale=2.3")
    root = create_root(config, str(tmp_path))
    settings = relabelled_config(root, ["annotation.rule=similarity"]).annotation
    assert (settings.rule, settings.scale, settings.model) == (
        "similarity",
        "auto",
        config.annotation.model,
    )
    unchanged = relabelled_config(root, ["annotation.rule=projection"]).annotation
    assert unchanged.scale == 2.3
    with pytest.raises(InputError, match=r"^annotation: `scale` belongs to rule proj"):
        relabelled_config(root, ["annotation.rule=similarity", "annotation.scale=3"])
