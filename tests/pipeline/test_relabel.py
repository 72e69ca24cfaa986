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

from data.errors import InputError
from data.label_sets import LabelSet, label_sets
from data.root import Root
from data.settings import load_settings
from data.shards import read_tar
from pipeline.annotate import Annotator, build_annotator
from pipeline.config import AnnotationConfig
from pipeline.plan import MixGroup
from pipeline.prototypes import ensure_prototypes, read_prototypes, unpack
from pipeline.relabel.batched import annotate_many
from pipeline.relabel.prototypes import ensure_set_prototypes
from pipeline.relabel.sets import (
    IMAGES,
    ROOT,
    is_own,
    plan_set,
    prototypes_name,
    relabelled_config,
)
from pipeline.relabel.stored import label_stored
from pipeline.root import create_root, plan_of
from pipeline.worker import main as worker

CHECKOUT = Path(__file__).parents[2]
SHARDS = 8


def start(root: Root, *overrides: str) -> LabelSet:
    labels = plan_set(root, relabelled_config(root, [f"annotation.{o}" for o in overrides]))
    ensure_set_prototypes(labels, device="cpu")
    return labels


def relabel(root: Root, *overrides: str) -> LabelSet:
    """Label everything; where images must be read, by a worker."""
    labels = start(root, *overrides)
    if labels.plan["features"] == IMAGES:
        assert worker([root.url, "--labels", labels.digest, "--device", "cpu"]) == 0
    else:
        label_stored(labels, labels.missing())
    return labels


def stored_records(root: Root) -> dict[int, dict]:
    records = {}
    for record in root.committed().values():
        with root.store.open(record["tar"]) as file:
            records |= {s.record["group"]: s.record for s in read_tar(file)}
    return records


def all_labels(labels: LabelSet) -> dict[int, dict]:
    return {g: found for shard in labels.committed() for g, found in labels.labels(shard).items()}


def contents(labels: LabelSet) -> dict[str, bytes]:
    return {name: labels.store.get(name) for name in labels.store.list(labels.folder)}


def test_another_sharpening_comes_from_stored_features(root):
    labels = relabel(root, "scale=4.0")
    assert labels.missing() == []
    assert labels.plan["features"] == ROOT
    found, stored = all_labels(labels), stored_records(root)
    assert sorted(found) == sorted(stored) == list(range(45))
    for group, record in stored.items():
        weights = torch.tensor(found[group]["weights"])
        torch.testing.assert_close(weights, torch.tensor(record["weights"]), atol=0.02, rtol=0.02)
        for weight, label in zip(found[group]["weights"], found[group]["labels"], strict=True):
            assert [k for k, _ in label] == record["classes"]
            assert label[0][1] == pytest.approx(expit(4.0 * (weight - 0.5)), abs=1e-6)


def test_stored_features_need_no_clip(root, hasty_standins, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("CLIP was loaded")

    monkeypatch.setattr("open_clip.create_model_and_transforms", refuse)
    monkeypatch.setattr("open_clip.create_model", refuse)
    monkeypatch.setattr("pipeline.relabel.features.decode_image", refuse)
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
    for group, found in all_labels(labels).items():
        for position, label in enumerate(found["labels"]):
            assert len(label) == expected
            assert sum(p for _, p in label) == pytest.approx(1, abs=1e-5)
            if "mixing_ratio" in rule[0]:
                series = plan.group(group)
                assert label == [
                    list(x) for x in zip(series.classes, series.mixture[position], strict=True)
                ]


def test_the_same_clip_from_images_gives_the_weights_of_the_build(root, hasty_standins, tmp_path):
    """Under another name it counts as another encoder, so the images are read again."""
    shutil.copytree(hasty_standins.clip, tmp_path / "renamed")
    labels = relabel(root, f"model=local-dir:{tmp_path / 'renamed'}")
    assert labels.plan["features"] == IMAGES
    found, stored = all_labels(labels), stored_records(root)
    assert sorted(found) == list(range(45))
    for group, record in stored.items():
        torch.testing.assert_close(
            torch.tensor(found[group]["weights"]),
            torch.tensor(record["weights"]),
            atol=1e-4,
            rtol=1e-4,
        )
    for shard, head in labels.committed().items():
        ours = load(root.store.get(head["features"]["name"]))["features"]
        theirs = load(root.store.get(root.committed()[shard]["features"]["name"]))["features"]
        torch.testing.assert_close(ours.float(), theirs.float(), atol=5e-3, rtol=5e-3)
        content = root.store.get(head["features"]["name"])
        assert head["features"]["sha256"] == hashlib.sha256(content).hexdigest()
        assert len(content) == head["features"]["bytes"]


def test_another_clip_gives_other_weights_and_its_features_serve_the_next_set(
    root, other_clip, tmp_path, monkeypatch
):
    clip = tmp_path / "clip"
    shutil.copytree(other_clip, clip)
    first = relabel(root, f"model=local-dir:{clip}")
    weights = all_labels(first)[0]["weights"]
    assert weights != pytest.approx(stored_records(root)[0]["weights"], abs=1e-3)
    monkeypatch.setattr("pipeline.clip.ClipEncoder", None)  # none is loaded
    second = relabel(root, f"model=local-dir:{clip}", "scale=3.0")
    assert second.plan["features"] == first.digest
    assert all_labels(second)[0]["weights"] == pytest.approx(weights, abs=0.02)
    assert not [name for name in contents(second) if name.endswith(".features.safetensors")]
    assert len(label_sets(root)) == 2


def test_features_of_another_precision_are_other_features(root):
    labels = relabel(root, "dtype=bfloat16")
    assert labels.plan["features"] == IMAGES
    tensors, facts = unpack(root.store.get(prototypes_name(labels)))
    assert json.loads(facts["encoder"])["dtype"] == "bfloat16"
    exact, _ = read_prototypes(root)
    assert 0 < (tensors["prototypes"] - exact).abs().max() < 0.05 * exact.abs().max()


def test_another_clip_at_the_same_place_is_another_set(root, other_clip, tmp_path):
    clip = tmp_path / "clip"
    shutil.copytree(other_clip, clip)
    overrides = [f"annotation.model=local-dir:{clip}"]
    first = plan_set(root, relabelled_config(root, overrides))
    file = clip / "open_clip_model.safetensors"
    weights = load_file(file)
    weights["visual.proj"] = -weights["visual.proj"]
    save_file(weights, file)
    assert plan_set(root, relabelled_config(root, overrides)).digest != first.digest
    ensure = [root.url, "--labels", first.digest, "--device", "cpu"]
    assert worker(ensure) == 78  # what was started with the old file is not continued with this


def test_a_second_encoder_that_the_root_lacks_is_read_from_images(root, other_clip):
    labels = relabel(root, f"second.model=local-dir:{other_clip}")
    assert labels.plan["features"] == IMAGES
    found = all_labels(labels)[7]
    assert len(found["agreement"]["difference"]) == 4
    head = labels.committed()[0]
    assert sorted(load(root.store.get(head["features"]["name"]))) == ["features", "second"]


def test_labels_are_the_same_bytes_wherever_they_are_made(root, built, other_clip, tmp_path):
    shutil.copytree(built.url, tmp_path / "twin")
    twin = Root(str(tmp_path / "twin"))
    for overrides in (("scale=4.0",), (f"model=local-dir:{other_clip}",)):
        ours, theirs = relabel(root, *overrides), relabel(twin, *overrides)
        assert contents(ours) == contents(theirs)


@pytest.mark.process
def test_a_killed_worker_is_continued_and_ends_as_an_unbroken_one(
    root, built, other_clip, tmp_path
):
    shutil.copytree(built.url, tmp_path / "twin")
    unbroken = relabel(Root(str(tmp_path / "twin")), f"model=local-dir:{other_clip}")
    labels = start(root, f"model=local-dir:{other_clip}")
    process = start_worker(root, labels)
    deadline = time.monotonic() + 120
    while not labels.committed() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = labels.committed()
    assert before
    assert worker([root.url, "--labels", labels.digest, "--device", "cpu"]) == 0
    assert {shard: labels.committed()[shard] for shard in before} == before
    assert contents(labels) == contents(unbroken)
    assert labels.failures() == {}


def start_worker(root: Root, labels: LabelSet, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipeline.worker", root.url, "--labels", labels.digest]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    }
    return subprocess.Popen([*command, "--device", "cpu", *more], env=environment)


@pytest.mark.process
def test_two_workers_share_a_set_without_losing_a_shard(root, built, other_clip, tmp_path):
    shutil.copytree(built.url, tmp_path / "twin")
    alone = relabel(Root(str(tmp_path / "twin")), f"model=local-dir:{other_clip}")
    labels = start(root, f"model=local-dir:{other_clip}")
    pair = [start_worker(root, labels, f"--slot={slot}", "--slots=2") for slot in range(2)]
    assert [process.wait(120) for process in pair] == [0, 0]
    assert contents(labels) == contents(alone)
    assert root.store.list("leases") == []


def test_only_committed_images_are_labelled_and_the_rest_later(root):
    root.discard(2)
    root.discard(5)
    labels = relabel(root, "scale=4.0")
    assert sorted(labels.committed()) == [0, 1, 3, 4, 6, 7]
    assert worker([root.url, "--device", "cpu"]) == 0
    assert labels.missing() == [2, 5]
    label_stored(labels, labels.missing())
    assert labels.missing() == []


def test_damaged_features_and_images_are_named_and_stop_no_other_shard(root, other_clip):
    records = root.committed()
    features = root.store.get(records[1]["features"]["name"])
    root.store.put(records[1]["features"]["name"], features[:-1] + bytes([features[-1] ^ 1]))
    root.store.delete(records[2]["features"]["name"])
    labels = relabel(root, "scale=4.0")
    assert labels.missing() == [1, 2]
    messages = {shard: tries[0]["message"] for shard, tries in labels.failures().items()}
    assert messages[1].endswith("does not have the recorded SHA-256")
    assert messages[1].startswith(records[1]["features"]["name"])
    assert messages[2].endswith("the shard's features are not there")
    tar = bytearray(root.store.get(records[3]["tar"]))
    tar[600] ^= 1
    root.store.put(records[3]["tar"], bytes(tar))
    read = start(root, f"model=local-dir:{other_clip}")
    assert worker([root.url, "--labels", read.digest, "--device", "cpu"]) == 1
    assert read.missing() == [3]
    failure = read.failures()[3][0]
    assert failure["message"].startswith(f"{records[3]['tar']}: group 18: not a complete")
    assert failure["group"] == 18


def test_other_bytes_than_recorded_are_never_labelled(root, other_clip):
    """Pixels that decode well but are not the committed ones."""
    records = root.committed()
    short, whole = records[7], records[6]
    with root.store.open(whole["tar"]) as file:
        swapped = file.read()
    root.store.put(short["tar"], swapped)
    labels = start(root, f"model=local-dir:{other_clip}")
    assert worker([root.url, "--labels", labels.digest, "--device", "cpu"]) == 1
    assert labels.missing() == [7]


def test_nothing_differs_from_the_roots_own_labels(root, other_clip):
    assert is_own(root, relabelled_config(root, []))
    own = root.plan["config"]["annotation"]["scale"]
    assert is_own(root, relabelled_config(root, [f"annotation.scale={own}"]))
    assert not is_own(root, relabelled_config(root, ["annotation.scale=3"]))
    changed = [f"annotation.model=local-dir:{other_clip}"]
    assert not is_own(root, relabelled_config(root, changed))


def test_an_encoder_whose_files_are_elsewhere_is_the_roots_own(
    make_config, hasty_standins, tmp_path
):
    here, there = tmp_path / "clip", tmp_path / "gone"
    shutil.copytree(hasty_standins.clip, here)
    config = load_settings(
        type(make_config(hasty_standins)),
        make_config(hasty_standins).model_dump(),
        [f"annotation.model=local-dir:{here}", "mixing.pairs={kind: sampled, count: 6}"],
    )
    root = create_root(config, str(tmp_path / "root"))
    ensure_prototypes(root, device="cpu")
    assert worker([root.url, "--device", "cpu"]) == 0
    here.rename(there)
    assert is_own(root, relabelled_config(root, []))
    labels = relabel(root, "scale=4.0")
    assert (labels.plan["features"], labels.missing()) == (ROOT, [])


def test_only_the_annotation_can_change(root):
    with pytest.raises(InputError, match=r"--set = mixing\.seed=7: the images are made; only"):
        relabelled_config(root, ["mixing.seed=7"])
    with pytest.raises(InputError, match=r"annotation\.scale"):
        relabelled_config(root, ["annotation.scale=-1"])


def annotator_of(config: AnnotationConfig, width: int = 16) -> Annotator:
    from pipeline.annotation.encoders import Encoders
    from pipeline.annotation.space import Space

    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(10, width, generator=rng)
    space = Space(vectors, 3.0, config.rule, config.temperature, config.normalize)
    return Annotator(config, {"features": space}, Encoders(config, device="cpu"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalize": True},
        {"rule": "similarity", "temperature": 0.1},
        {"rule": "simplex"},
        {"rule": "mixing_ratio"},
    ],
)
def test_all_series_in_one_go_are_labelled_as_one_by_one(settings):
    annotator = annotator_of(AnnotationConfig(**settings))
    mixture = ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0))
    pairs = [(0, 1), (3, 9), (0, 1), (2, 4)]
    groups = [MixGroup(i, pair, 0, mixture) for i, pair in enumerate(pairs)]
    features = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1))
    found = annotate_many(annotator, {"features": features}, groups)
    for row, group in enumerate(groups):
        alone = annotator.annotate(
            {"features": features[row]}, classes=group.classes, mixture=mixture
        )
        assert found[row].keys() == alone.keys()
        assert found[row]["weights"] == pytest.approx(alone["weights"], abs=1e-5)
        for ours, theirs in zip(found[row]["labels"], alone["labels"], strict=True):
            assert [k for k, _ in ours] == [k for k, _ in theirs]
            assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-5)


def test_an_image_that_is_like_no_class_is_named_with_its_group():
    annotator = annotator_of(AnnotationConfig(rule="similarity"))
    features = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    features[1, 2] = 0
    groups = [MixGroup(i, (0, 1), 0, ((0.0, 1.0),) * 3) for i in (40, 41)]
    with pytest.raises(ValueError, match="group 41: image 2 has no positive cosine"):
        annotate_many(annotator, {"features": features}, groups)


def test_a_feature_that_is_no_number_is_named_with_its_group():
    features = torch.zeros(2, 3, 16)
    features[1, 2, 5] = float("nan")
    groups = [MixGroup(i, (0, 1), 0, ((0.0, 1.0),) * 3) for i in (40, 41)]
    with pytest.raises(FloatingPointError, match="group 41: the CLIP features of image 2"):
        annotate_many(annotator_of(AnnotationConfig()), {"features": features}, groups)


def test_prototypes_of_a_set_are_measured_once(root, other_clip):
    labels = start(root, f"model=local-dir:{other_clip}")
    name = f"{labels.folder}/prototypes.safetensors"
    before = root.store.get(name)
    ensure_set_prototypes(labels, device="cpu")
    assert root.store.get(name) == before
    assert before != root.store.get("prototypes.safetensors")
    config = load_settings(AnnotationConfig, labels.plan["annotation"])
    assert build_annotator(config, before, device="cpu").config == config


def test_settings_of_another_rule_or_model_fall_back(make_config, hasty_standins, tmp_path):
    config = make_config(hasty_standins, "annotation.scale=2.3")
    root = create_root(config, str(tmp_path))
    found = relabelled_config(root, ["annotation.rule=similarity"]).annotation
    assert (found.rule, found.scale, found.model) == ("similarity", "auto", config.annotation.model)
    same = relabelled_config(root, ["annotation.rule=projection"]).annotation
    assert same.scale == 2.3
    with pytest.raises(InputError, match=r"^annotation = as given: `scale` belongs to rule proj"):
        relabelled_config(root, ["annotation.rule=similarity", "annotation.scale=3"])
