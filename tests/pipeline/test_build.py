import hashlib
import json
import shutil
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load
from scipy.special import expit

from data.errors import InputError
from data.images import decode_image
from data.mixed import MixedDataset
from data.root import Root
from data.settings import load_settings
from data.shards import read_tar
from data.store import Store
from pipeline.batch import make_batch
from pipeline.build import generate_shard, load_models
from pipeline.config import BuildConfig
from pipeline.prototypes import ensure_prototypes, read_prototypes
from pipeline.root import create_root, plan_of
from pipeline.work import finish
from pipeline.worker import main as worker


def altered(config: BuildConfig, *overrides: str) -> BuildConfig:
    return load_settings(BuildConfig, config.model_dump(), overrides)


def test_a_finished_root_is_complete_and_verifies(built):
    assert built.missing() == []
    assert built.verify(full=True) == []
    found = built.progress()
    assert (found.done, found.groups_done, found.images_done, found.failed) == (8, 45, 180, 0)
    assert built.store.list("leases") == []


def test_a_shard_holds_what_the_plan_says(built):
    plan, record = plan_of(built), built.committed()[7]
    with built.store.open(record["tar"]) as file:
        samples = list(read_tar(file))
    assert [s.record["group"] for s in samples] == [42, 43, 44]
    for sample in samples:
        group = plan.group(sample.record["group"])
        assert sample.record["classes"] == [group.first, group.second]
        assert sample.record["names"] == [plan.class_names[k] for k in (group.first, group.second)]
        assert sample.record["seed"] == group.seed
        assert sample.record["alphas"] == [0.0, 1 / 3, 2 / 3, 1.0]
        assert decode_image(sample.images[0]).shape == (32, 32, 3)


def test_labels_are_the_sharpened_weights_of_the_stored_features(built):
    vectors, facts = read_prototypes(built)
    record = built.committed()[0]
    with built.store.open(record["tar"]) as file:
        sample = next(read_tar(file)).record
    features = load(built.store.get(record["features"]["name"]))["features"][0].float()
    first, second = (vectors[k] for k in sample["classes"])
    axis = first - second
    weights = (features - second) @ axis / (axis @ axis)
    torch.testing.assert_close(weights, torch.tensor(sample["weights"]), atol=0.01, rtol=0.01)
    for weight, label in zip(sample["weights"], sample["labels"], strict=True):
        assert [k for k, _ in label] == sample["classes"]
        expected = expit(float(facts["scale"]) * (weight - 0.5))
        np.testing.assert_allclose([p for _, p in label], [expected, 1 - expected], atol=1e-6)


def test_clip_sees_the_stored_pixels(built):
    plan, record = plan_of(built), built.committed()[3]
    models = load_models(built, plan, device="cpu")
    with built.store.open(record["tar"]) as file:
        images = np.stack([decode_image(i) for s in read_tar(file) for i in s.images])
    stored = load(built.store.get(record["features"]["name"]))["features"].flatten(0, 1).float()
    torch.testing.assert_close(
        models.annotator.encode(torch.from_numpy(images))["features"], stored, atol=5e-3, rtol=5e-3
    )


def test_the_same_shard_made_again_has_the_same_bytes(built, tmp_path):
    plan = plan_of(built)
    shutil.copytree(built.url, tmp_path / "again")
    again = Root(str(tmp_path / "again"))
    models = load_models(again, plan, device="cpu")
    for shard in (7, 2):
        again.discard(shard)
        record = finish(generate_shard(plan.shard(shard), plan, models=models, root=again))
        assert record["sha256"] == built.committed()[shard]["sha256"]


def test_publishing_is_no_part_of_a_shards_wall_seconds_and_waiting_for_it_is(
    built, tmp_path, monkeypatch
):
    shutil.copytree(built.url, tmp_path / "again")
    again, plan, now = Root(str(tmp_path / "again")), plan_of(built), [0.0]
    again.discard(7)
    publish = Store.publish

    def slow(self, partial, name):
        now[0] += 7
        publish(self, partial, name)

    monkeypatch.setattr("pipeline.stopwatch.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Store, "publish", slow)
    models = load_models(again, plan, device="cpu")
    making = generate_shard(plan.shard(7), plan, models=models, root=again)
    next(making)
    now[0] += 5  # until the shard before is published
    record = finish(making)
    assert record["wall_seconds"] == record["seconds"]["stall"] == 5
    assert record["seconds"]["write"] == 7


def test_all_images_of_a_group_start_from_one_noise(built, monkeypatch):
    plan = plan_of(built)
    models = load_models(built, plan, device="cpu")
    seen = []
    sample = models.generator.sample
    monkeypatch.setattr(
        models.generator, "sample", lambda n, c, a: (seen.append((n, c)), sample(n, c, a))[1]
    )
    from pipeline.mixing import mix_groups

    groups = [plan.group(i) for i in (44, 3)]
    noise, _ = models.noise(groups)
    images = mix_groups(
        groups,
        noise,
        embeddings=models.embeddings,
        generator=models.generator,
        batch_groups=4,
    )
    ((noise, condition),) = seen
    assert images.shape == (2, 4, 32, 32, 3)
    assert len(noise) == 16
    series = noise.view(4, 4, *noise.shape[1:])
    assert all(torch.equal(series[g, 0], series[g, a]) for g in range(4) for a in range(4))
    assert not torch.equal(series[0, 0], series[1, 0])
    torch.testing.assert_close(condition.tokens[0], models.embeddings.tokens[groups[0].second])
    torch.testing.assert_close(condition.tokens[3], models.embeddings.tokens[groups[0].first])


def test_the_pipeline_itself_makes_the_same_image(built):
    """Against diffusers called as its documentation shows, with text prompts."""
    plan = plan_of(built)
    models = load_models(built, plan, device="cpu")
    from pipeline.noise import initial_noise
    from pipeline.prompts import prompts

    noise = initial_noise([plan.group(0).seed], models.generator.latent_shape)
    ours = models.generator.decode(models.generator.sample(noise, models.embeddings[:1])).numpy()
    theirs = models.generator.denoiser.pipeline(
        prompts(plan.config.generator.prompt, plan.class_names[:1]),
        latents=noise,
        num_inference_steps=3,
        guidance_scale=2.0,
        output_type="np",
    ).images
    assert np.abs(ours[0].astype(int) - np.round(theirs[0] * 255)).max() <= 1


def test_mixed_dataset_draws_as_the_paper(built):
    mixed = MixedDataset(built.url)
    assert mixed.images.shape == (45, 4, 32, 32, 3)
    torch.testing.assert_close(mixed.labels.sum(-1), torch.ones(45, 4))
    targets = torch.tensor([0, 9, 4, 4, 7] * 20)
    images, labels = mixed.draw(targets, rng=torch.Generator().manual_seed(0))
    assert (images.shape, labels.shape) == ((100, 2, 32, 32, 3), (100, 2, 10))
    rows = torch.arange(100)
    # The end point is the most certain image of its group for the real image's own class.
    flat = mixed.images.flatten(2)
    for row in rows.tolist():
        group = (flat == images[row, 0].flatten()).all(-1).any(1).nonzero()[0, 0]
        assert targets[row] in mixed.classes[group]
        certainty = mixed.labels[group, :, targets[row]]
        assert labels[row, 0, targets[row]] == certainty.max()
        inner = labels[row, 1, targets[row]]
        assert inner in certainty.sort().values[1:-1]
    again = mixed.draw(targets, rng=torch.Generator().manual_seed(0))
    assert torch.equal(images, again[0])


def test_labels_can_be_sharpened_anew_from_the_raw_weights(built):
    mixed = MixedDataset(built.url, scale=4.0)
    first = mixed.classes[0, 0]
    expected = torch.sigmoid(4 * (mixed.weights[0] - 0.5))
    torch.testing.assert_close(mixed.labels[0, :, first], expected)


def test_another_config_on_the_same_root_is_refused_by_its_fields(built, hasty_config):
    changed = altered(hasty_config, "mixing.seed=5", "generator.steps=4")
    before = built.store.get("plan.json")
    with pytest.raises(InputError, match=r"generator\.steps is 3 there, mixing\.seed is 0 there"):
        create_root(changed, built.url)
    assert built.store.get("plan.json") == before
    assert create_root(hasty_config, built.url).missing() == []


def test_a_shard_size_that_is_not_set_is_stored_and_agrees_with_any(built, hasty_config, tmp_path):
    unset = altered(hasty_config, "shards.groups_per_shard=null")
    assert create_root(unset, built.url).missing() == []
    new = create_root(unset, str(tmp_path / "root"))
    assert new.plan["config"]["shards"]["groups_per_shard"] == 4  # 45 groups in batches of 4
    assert len(new.missing()) == 12 and plan_of(new).num_shards == 12
    other = altered(hasty_config, "shards.groups_per_shard=5")
    with pytest.raises(InputError, match=r"shards\.groups_per_shard is 6 there"):
        create_root(other, built.url)


def test_changed_model_files_are_refused_while_shards_are_missing(
    make_config, hasty_standins, tmp_path
):
    shutil.copytree(hasty_standins.diffusion, tmp_path / "model")
    config = make_config(hasty_standins, f"generator.model={tmp_path / 'model'}")
    create_root(config, str(tmp_path / "root"))
    index = tmp_path / "model" / "model_index.json"
    index.write_text(index.read_text() + "\n")
    with pytest.raises(InputError, match=r"generator\.model = .*its files changed since"):
        create_root(config, str(tmp_path / "root"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generator.model=/nowhere", r"generator\.model = /nowhere: there is no such folder"),
        (
            "annotation.model=local-dir:/no",
            r"annotation\.model = /no: there is no such folder",
        ),
        (
            "generator.prompt=" + "a photo of " * 9 + "a {class}",
            r"generator\.prompt = 'a photo of .* a zero': has \d+ tokens, the model reads 16",
        ),
        ("generator.names={fox: wolf}", r"generator\.names = fox: is no class of the data"),
        ("annotation.model=ViT-B-33", r"annotation\.model = ViT-B-33: open_clip has no such model"),
        ("annotation.model=ViT-B-32", r"annotation\.pretrained = nothing: name a weights tag"),
    ],
)
def test_bad_models_stop_before_anything_is_written(hasty_config, tmp_path, override, message):
    with pytest.raises(InputError, match=message):
        create_root(altered(hasty_config, override), str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()


def test_a_model_of_the_wrong_kind_is_named(hasty_config, hasty_standins, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(InputError, match="holds a FluxPipeline; family stable_diffusion needs"):
        create_root(altered(hasty_config, f"generator.model={wrong}"), str(tmp_path / "root"))


def test_a_failing_shard_is_recorded_and_the_rest_goes_on(
    built, hasty_config, tmp_path, monkeypatch
):
    root = create_root(hasty_config, str(tmp_path / "root"))
    ensure_prototypes(root, device="cpu")
    import pipeline.mixing as mixing

    original = mixing.refuse_degenerate

    def flat_in_group_20(values, groups, kind):
        if kind == "image" and any(group.index == 20 for group in groups):
            values = torch.zeros_like(values)
        original(values, groups, kind)

    monkeypatch.setattr(mixing, "refuse_degenerate", flat_in_group_20)
    assert worker([root.url, "--device", "cpu"]) == 1
    assert root.missing() == [3]
    failure = root.failures()[3][0]
    assert failure["error"] == "ValueError"
    assert failure["message"].startswith("group 18: image 0 is one flat value (0)")
    monkeypatch.undo()
    assert worker([root.url, "--device", "cpu"]) == 0
    assert root.committed()[3]["attempt"] == 2
    tars = {r["tar"]: r["sha256"] for r in root.committed().values()}
    assert tars == {r["tar"]: r["sha256"] for r in built.committed().values()}


def test_features_that_are_no_numbers_fail_their_shard_by_name(hasty_config, tmp_path, monkeypatch):
    root = create_root(hasty_config, str(tmp_path / "root"))
    ensure_prototypes(root, device="cpu")
    from pipeline.clip import ClipEncoder

    encode, calls = ClipEncoder.encode, []

    def overflowing(self, images):
        calls.append(len(images))
        features = encode(self, images)
        if len(calls) == 2:  # the last two groups of shard 0
            features[5] = 1e6  # a number, but none that float16 has
        return features

    monkeypatch.setattr(ClipEncoder, "encode", overflowing)
    assert worker([root.url, "--device", "cpu", "--shards", "0"]) == 1
    failure = root.failures()[0][0]
    assert failure["error"] == "FloatingPointError"
    assert failure["message"] == (
        "group 5: the CLIP features of image 1 are not finite, or too large for float16"
    )


def test_a_shard_is_published_while_the_next_one_is_generated(hasty_config, bucket, monkeypatch):
    """The bucket takes the first tar no sooner than the second shard has been generated."""
    root = create_root(hasty_config, f"{bucket}/mixed")
    ensure_prototypes(root, device="cpu")
    events, generated = [], Event()
    publish, create = Store.publish, Store.create

    def generate(groups, plan, **options):
        shard = plan.layout.shard_of(groups[0].index)
        events.append(f"generate {shard}")
        batch = make_batch(groups, plan, **options)
        if shard == 1 and groups[-1].index + 1 == plan.shard(1).stop:
            generated.set()
        return batch

    def slow(self, partial, name):
        assert generated.wait(30), "nothing was generated meanwhile"
        publish(self, partial, name)

    def noted(self, name, content):
        if name.startswith("shards/"):
            events.append(f"record {int(name[-12:-5])}")
        return create(self, name, content)

    monkeypatch.setattr("pipeline.build.make_batch", generate)
    monkeypatch.setattr(Store, "publish", slow)
    monkeypatch.setattr(Store, "create", noted)
    assert worker([root.url, "--device", "cpu", "--shards", "0-3"]) == 0
    assert [event for event in events if "record" in event] == [f"record {n}" for n in range(4)]
    assert events.index("generate 1") < events.index("record 0") < events.index("generate 2")
    assert events.index("record 1") < events.index("generate 3")
    assert root.verify(full=True) == [] and root.store.list("leases") == []


def test_the_worker_makes_only_the_shards_named(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path / "root"))
    ensure_prototypes(root, device="cpu")
    assert (
        worker([root.url, "--device", "cpu", "--shards", "1,6-7", "--slot", "1", "--slots", "2"])
        == 0
    )
    assert sorted(root.committed()) == [1, 6, 7]


def test_the_worker_tells_bad_settings_by_its_status(tmp_path, capsys):
    assert worker([str(tmp_path)]) == 78
    assert "holds no plan.json" in capsys.readouterr().err


def test_the_tar_name_carries_its_hash(built):
    for record in built.committed().values():
        content = built.store.get(record["tar"])
        digest = hashlib.sha256(content).hexdigest()
        assert record["sha256"] == digest
        assert record["tar"].endswith(f"-{digest[:8]}.tar")
