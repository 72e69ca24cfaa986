"""Labels by hand and by oracle, each rule; two CLIP models on the same images."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize
from scipy.special import expit, softmax
from torch import Tensor

from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES, Labels
from semix.data.labels import sharpen
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.pipeline.annotate import (
    Annotator,
    Encoders,
    build_annotator,
    class_prototypes,
    coordinates,
    projection_weight,
    similarity_labels,
    simplex_projection,
    total_variation,
)
from semix.pipeline.config import AnnotationConfig, EncoderConfig
from semix.pipeline.estimate import series_cost
from semix.pipeline.plan import MixGroup
from semix.pipeline.prototype_statistics import Measurement, WeightVariance, unit
from semix.pipeline.prototypes import unpack
from tests.pipeline.roots import altered, begun, create_root, features, made, plan_of, samples

CAT, DOG = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])
AXES = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
CORNER = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def annotator(*prototypes: Tensor, scales=(4.0, 4.0), **settings) -> Annotator:
    """An annotator of given features, which loads no CLIP; `scales` are inverse variances."""
    config = AnnotationConfig(**settings)
    measurements = {
        name: Measurement(vectors, unit(vectors), 1 / scale, 1 / scale)
        for name, vectors, scale in zip(("features", "second"), prototypes, scales, strict=False)
    }
    return Annotator(config, measurements, Encoders(config, device="cpu"))


def label(annotator: Annotator, classes, mixture, *features: Tensor) -> Labels:
    """The labels of one series from its features under each encoder."""
    rows = zip(annotator.measurements, features, strict=True)
    group = MixGroup(7, classes, 0, mixture)
    (result,) = annotator.annotate({name: vectors[None] for name, vectors in rows}, [group])
    return result


def probabilities(labels: Labels) -> np.ndarray:
    """Probabilities [A, k] of a series, without their classes."""
    return np.array([[p for _, p in row] for row in labels.labels])


# The formulas.


def test_prototypes_are_class_means():
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    result = class_prototypes(features, torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(result, torch.tensor([[2.0, 0.0], [0.0, 5.0]]))
    with pytest.raises(ValueError, match="class 2 has no features"):
        class_prototypes(features, torch.tensor([0, 0, 1]), 3)


def test_projection_by_hand_and_unclipped():
    points = [CAT, DOG, (CAT + DOG) / 2, 2 * CAT - DOG, CAT + torch.tensor([5.0, 5.0])]
    result = projection_weight(torch.stack(points), CAT.expand(5, 2), DOG.expand(5, 2))
    torch.testing.assert_close(result, torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0]))


def test_mean_weight_of_the_images_behind_a_prototype_is_one():
    features, targets = random(40, 6) + 3, torch.arange(40) % 2
    prototypes = class_prototypes(features, targets, 2)
    images = features[targets == 0]
    mean = projection_weight(
        images, prototypes[0].expand_as(images), prototypes[1].expand_as(images)
    ).mean()
    torch.testing.assert_close(mean, torch.tensor(1.0), atol=1e-5, rtol=0)


def test_coinciding_prototypes_define_no_line():
    with pytest.raises(ValueError, match="two class prototypes coincide"):
        projection_weight(CAT[None], DOG[None], DOG[None])


def test_automatic_scale_makes_labels_the_posterior_of_two_gaussians():
    targets = torch.arange(40_000) % 2
    centres = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    spread = WeightVariance(centres, centres)
    spread.add(centres[targets] + random(40_000, 2), targets)
    point = torch.tensor([[1.4, 3.0]])
    result = sharpen(projection_weight(point, centres[:1], centres[1:]), 1 / spread.value())
    # Densities of the two classes at x = 1.4, both of variance 1 around 2 and 0.
    near, far = math.exp(-(0.6**2) / 2), math.exp(-(1.4**2) / 2)
    torch.testing.assert_close(result, torch.tensor([near / (near + far)]), atol=0.01, rtol=0)


def test_shares_of_similarity_by_hand():
    """Cosines 1, 0 and 0.6: S000's formula divides them by their sum."""
    prototypes = torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.2, 1.6]])
    labels = similarity_labels(torch.tensor([[5.0, 0.0]]), prototypes, None)
    torch.testing.assert_close(labels, torch.tensor([[0.625, 0.0, 0.375]]))


def test_a_negative_cosine_has_no_share():
    prototypes = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]])
    labels = similarity_labels(torch.tensor([[1.0, 0.0]]), prototypes, None)
    assert labels[0, 1] == 0
    torch.testing.assert_close(labels.sum(1), torch.ones(1))
    away = torch.tensor([[1.0, 0.0], [-1.0, -1.0]])
    with pytest.raises(ValueError, match="image 1 has no positive cosine to any prototype; set te"):
        similarity_labels(away, torch.tensor([[1.0, 0.0], [1.0, 1.0]]), None)


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
def test_similarity_with_a_temperature_is_a_softmax_of_cosines(temperature):
    features, prototypes = random(12, 5) + 1, random(7, 5, seed=1) + 1
    f, p = features.double().numpy(), prototypes.double().numpy()
    cosine = (f @ p.T) / np.linalg.norm(f, axis=1)[:, None] / np.linalg.norm(p, axis=1)
    result = similarity_labels(features, prototypes, temperature)
    np.testing.assert_allclose(result, softmax(cosine / temperature, axis=1), rtol=2e-4, atol=1e-6)


def test_total_variation_by_hand():
    first = torch.tensor([[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]])
    second = torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(total_variation(first, second), torch.tensor([0.4, 1.0]))


def test_corners_middles_and_outside_of_a_simplex_by_hand():
    points = torch.tensor([[2.0, 0, 5], [1, 1, 0], [0.5, 0.5, -1], [-3, 1, 0], [9, 9, 0]])
    expected = [[0, 1, 0], [0, 0.5, 0.5], [0.5, 0.25, 0.25], [0.5, 0, 0.5], [0, 0.5, 0.5]]
    result = simplex_projection(points[None], CORNER[None])[0]
    torch.testing.assert_close(result, torch.tensor(expected))
    raw = coordinates(points[None], CORNER[None])[0]
    torch.testing.assert_close(raw[3], torch.tensor([2.0, -1.5, 0.5]))


def test_two_vertices_give_the_projection_weight_of_csm():
    features, ends = random(3, 20, 7), random(3, 2, 7, seed=1)
    first, second = (end.repeat_interleave(20, 0) for end in ends.unbind(1))
    weight = projection_weight(features.flatten(0, 1), first, second).view(3, 20)
    torch.testing.assert_close(coordinates(features, ends), torch.stack([weight, 1 - weight], 2))
    inside = weight.clamp(0, 1)
    result = simplex_projection(features, ends)
    torch.testing.assert_close(result, torch.stack([inside, 1 - inside], 2))


@pytest.mark.parametrize("classes", [3, 4, 6])
def test_it_is_the_nearest_point_of_the_simplex(classes):
    """Against a general solver of the constrained least squares problem."""
    vertices = random(classes, 9, seed=classes, dtype=torch.float64)
    features = 1.5 * random(8, 9, seed=9, dtype=torch.float64)
    result = simplex_projection(features[None], vertices[None])[0]
    torch.testing.assert_close(result.sum(1), torch.ones(8, dtype=torch.float64))
    for feature, weights in zip(features, result, strict=True):
        solved = minimize(
            lambda w, f=feature: float((torch.from_numpy(w) @ vertices - f).square().sum()),
            [1 / classes] * classes,
            bounds=[(0, 1)] * classes,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            tol=1e-12,
        )
        torch.testing.assert_close(weights, torch.from_numpy(solved.x), atol=1e-4, rtol=0)


def test_vertices_in_one_line_are_an_error():
    line = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]])
    with pytest.raises(ValueError, match="coincide or lie in one line"):
        coordinates(torch.zeros(1, 1, 2), line)


# The labels of series.


def test_a_pair_by_hand():
    """At the first prototype, at the second, and twice as far as the first."""
    features = torch.tensor([[0.0, 2, 0], [0, 0, 2], [0, 4, -2]])
    labels = label(annotator(AXES), (1, 2), ((1, 0), (0, 1), (0.5, 0.5)), features)
    assert labels.weights == [1.0, 0.0, 2.0]
    assert [[k for k, _ in image] for image in labels.labels] == [[1, 2]] * 3
    np.testing.assert_allclose(
        probabilities(labels)[:, 0], [0.880797, 0.119203, 0.997527], atol=1e-6
    )
    np.testing.assert_allclose(probabilities(labels).sum(1), 1, atol=1e-6)
    assert labels.coordinates is labels.agreement is None


def test_normalised_features_lie_between_unit_prototypes():
    """Features in the directions of both prototypes, whatever their length, and half-way."""
    features, mixture = torch.tensor([[7.0, 0.0], [0.0, 0.1], [3.0, 3.0]]), ((0.5, 0.5),) * 3
    result = label(annotator(torch.eye(2), normalize=True), (0, 1), mixture, features)
    np.testing.assert_allclose(result.weights, [1.0, 0.0, 0.5], atol=1e-6)
    np.testing.assert_allclose(probabilities(result)[:, 0], [0.880797, 0.119203, 0.5], atol=1e-6)
    bare = label(annotator(torch.eye(2)), (0, 1), mixture, features)
    np.testing.assert_allclose(bare.weights, [4, 0.45, 0.5], atol=1e-6)


def test_the_mixing_ratio_labels_by_the_conditioning_alone():
    features = torch.tensor([[0.0, 2, 0], [0, 0, 2]])
    mixture = ((0.25, 0.75), (1, 0))
    result = label(annotator(AXES, rule="mixing_ratio"), (1, 2), mixture, features)
    assert result.labels == [[(1, 0.25), (2, 0.75)], [(1, 1.0), (2, 0.0)]]
    assert result.weights == [1.0, 0.0]


@pytest.mark.parametrize("temperature", [None, 0.2])
def test_similarity_labels_name_all_classes(temperature):
    features = torch.tensor([[0.5, 2, 0.1], [0.1, 0.3, 2]])
    by_similarity = annotator(AXES, rule="similarity", temperature=temperature)
    result = label(by_similarity, (1, 2), ((1, 0), (0, 1)), features)
    expected = similarity_labels(features, AXES, temperature)
    assert result.labels == [list(enumerate(row)) for row in expected.tolist()]
    assert result.weights == pytest.approx([0.975, 0.075])  # the projection stays


@pytest.mark.parametrize("rule", ["simplex", "mixing_ratio", "similarity"])
def test_three_classes(rule):
    features, mixture = torch.tensor([[0.0, 2, 0], [1, 1, 3]]), ((0, 1, 0), (0.2, 0.3, 0.5))
    result = label(annotator(AXES, rule=rule), (0, 1, 2), mixture, features)
    # The plane of the three prototypes is x + y + z = 2; (1, 1, 3) falls on (0, 0, 2).
    np.testing.assert_allclose(result.coordinates, [[0, 1, 0], [0, 0, 1]], atol=1e-6)
    assert result.weights == [row[0] for row in result.coordinates]
    expected = {
        "simplex": simplex_projection(features[None], AXES[None])[0],
        "mixing_ratio": torch.tensor(mixture, dtype=torch.float64),
        "similarity": similarity_labels(features, AXES, None),
    }
    assert probabilities(result).tolist() == expected[rule].tolist()


PAIRS = [
    MixGroup(40 + row, classes, 0, ((0.0, 1.0), (0.5, 0.5), (1.0, 0.0)))
    for row, classes in enumerate([(0, 1), (3, 9), (0, 1), (2, 4)])
]
TRIPLES = [
    MixGroup(40 + row, classes, 0, ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.2, 0.3, 0.5)))
    for row, classes in enumerate([(0, 1, 2), (3, 7, 9), (2, 4, 8)])
]
SETTINGS = {
    "projection": {},
    "unit": {"normalize": True},
    "similarity": {"rule": "similarity", "temperature": 0.1},
    "simplex": {"rule": "simplex"},
    "mixing_ratio": {"rule": "mixing_ratio"},
}


@pytest.mark.parametrize("groups", [PAIRS, TRIPLES], ids=["pairs", "triples"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_all_series_in_one_go_are_labelled_as_one_by_one(settings, groups):
    both = {"second": EncoderConfig(model="another")} | SETTINGS[settings]
    model = annotator(random(10, 16), random(10, 12, seed=1), scales=(3.0, 2.0), **both)
    inputs = {"features": random(len(groups), 3, 16, seed=2)}
    inputs["second"] = random(len(groups), 3, 12, seed=3)
    for row, result in enumerate(model.annotate(inputs, groups)):
        single = {name: rows[row : row + 1] for name, rows in inputs.items()}
        (alone,) = model.annotate(single, groups[row : row + 1])
        assert [[k for k, _ in image] for image in result.labels] == [
            [k for k, _ in image] for image in alone.labels
        ]
        np.testing.assert_allclose(probabilities(result), probabilities(alone), atol=1e-5)
        np.testing.assert_allclose(result.weights, alone.weights, atol=1e-5)
        for name in ("weights", "difference"):
            values = (getattr(labels.agreement, name) for labels in (result, alone))
            np.testing.assert_allclose(*values, atol=1e-5)
        assert (result.coordinates is None) == (len(groups[0].classes) == 2)
        if result.coordinates:
            np.testing.assert_allclose(result.coordinates, alone.coordinates, atol=1e-5)


def test_labels_are_the_same_to_the_last_digit_however_many_series_are_sharpened_together():
    groups = [
        MixGroup(n, (0, 1), 0, tuple((a / 7, 1 - a / 7) for a in range(8))) for n in range(64)
    ]
    model, inputs = annotator(random(10, 16)), random(64, 8, 16, seed=2)
    alone = [model.annotate({"features": inputs[[n]]}, [groups[n]])[0].labels for n in range(64)]
    assert [result.labels for result in model.annotate({"features": inputs}, groups)] == alone


def test_an_image_that_is_like_no_class_is_named_with_its_group():
    values = random(4, 3, 16, seed=2)
    values[1, 2] = 0
    with pytest.raises(ValueError, match=r"^group 41: image 2 has no positive cosine"):
        annotator(random(10, 16), rule="similarity").annotate({"features": values}, PAIRS)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])  # a number, but not of float16
def test_features_that_cannot_be_stored_are_named_with_their_group(value):
    values = random(4, 3, 16, seed=2)
    values[1, 2, 5] = value
    message = "^group 41: the CLIP features of image 2 are not finite, or too large for float16$"
    with pytest.raises(ValueError, match=message):
        annotator(random(10, 16)).annotate({"features": values}, PAIRS)


def test_stored_features_are_taken_as_they_are():
    stored = torch.tensor([[0.0, 2, 0], [0, 0.5, 2]]).half()
    assert label(annotator(AXES), (1, 2), ((1, 0), (0, 1)), stored).weights == [1.0, 0.125]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("temperature=0.1", "`temperature` belongs to rule similarity, and only to it"),
        ("temperature=0", "greater than 0"),
        ("rule=cosine", "choose one of projection, simplex, similarity, mixing_ratio"),
        ("scale=-1", "must be positive, or auto"),
        ("second={model: ViT-B-32-quickgelu}", "`second` is the first model again; name another"),
        ("second={model: ViT-B-32, pretraned: openai}", "did you mean second.pretrained"),
    ],
)
def test_settings_that_do_not_fit_are_named(override, message):
    with pytest.raises(InputError, match=message):
        load_settings(AnnotationConfig, {}, [override])


@pytest.mark.parametrize("rule", ["simplex", "similarity", "mixing_ratio"])
def test_a_scale_without_a_projection_is_refused(rule):
    with pytest.raises(InputError, match="`scale` belongs to rule projection, and only to it"):
        load_settings(AnnotationConfig, {"rule": rule, "scale": 2.0})
    assert load_settings(AnnotationConfig, {"rule": rule}).scale == "auto"


# Two CLIP models: in the second the prototypes lie on other axes, with a scale of their own.


def two(**settings) -> Annotator:
    one = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    other = torch.tensor([[0.0, 2.0], [0.0, 0.0], [2.0, 0.0]])
    both = {"second": EncoderConfig(model="another")} | settings
    return annotator(one, other, scales=(4.0, 2.0), **both)


def test_the_difference_is_that_of_the_sharpened_probabilities():
    both_features = torch.tensor([[1.0, 0.0], [0.5, 9.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    result = label(two(), (0, 1), ((1, 0), (0.5, 0.5)), *both_features)
    assert result.weights == [1.0, 0.5]
    assert result.agreement.weights == [1.0, 0.0]
    expected = [expit(4 * 0.5) - expit(2 * 0.5), expit(0) - expit(2 * -0.5)]
    np.testing.assert_allclose(result.agreement.difference, expected, atol=1e-6)


def test_three_classes_differ_by_total_variation():
    both_features = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.5]])
    result = label(two(rule="simplex"), (0, 1, 2), ((1, 0, 0),), *both_features)
    assert result.labels == [[(0, 1.0), (1, 0.0), (2, 0.0)]]
    # (1, 1/2) is half of (2, 0) and a quarter of (0, 2): labels (1, 0, 0) and (.25, .25, .5).
    np.testing.assert_allclose(result.agreement.difference, [0.75], atol=1e-6)
    np.testing.assert_allclose(result.agreement.weights, [0.25], atol=1e-6)


def test_the_mixing_ratio_compares_what_the_two_models_see():
    both_features = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    result = label(two(rule="mixing_ratio"), (0, 1), ((0.3, 0.7),), *both_features)
    assert result.labels == [[(0, 0.3), (1, 0.7)]]
    np.testing.assert_allclose(result.agreement.difference, [expit(2) - expit(-1)], atol=1e-6)


@pytest.fixture(scope="module")
def second_clip(hasty_standins, tmp_path_factory) -> Path:
    """The hasty CLIP with other weights: a genuine second model."""
    folder = tmp_path_factory.mktemp("second") / "clip"
    shutil.copytree(hasty_standins.clip, folder)
    weights = load_file(folder / "open_clip_model.safetensors")
    rng = torch.Generator().manual_seed(0)
    noisy = {
        name: w + 0.3 * w.std() * torch.randn(w.shape, generator=rng) if w.ndim > 1 else w
        for name, w in weights.items()
    }
    save_file(noisy, folder / "open_clip_model.safetensors")
    return folder


def second(folder: Path) -> str:
    return f"annotation.second={{model: 'local-dir:{folder}'}}"


@pytest.fixture(scope="module")
def two_model_root(hasty_config, second_clip, tmp_path_factory) -> Root:
    five = "mixing.pairs={kind: sampled, count: 5}"
    return made(altered(hasty_config, second(second_clip), five), tmp_path_factory.mktemp("agreed"))


def test_a_build_stores_what_both_models_say(two_model_root):
    tensors, facts = unpack(two_model_root.store.get(PROTOTYPES))
    assert tensors["second"].shape == tensors["prototypes"].shape
    assert not torch.equal(tensors["second"], tensors["prototypes"])
    assert float(facts["second_scale"]) != float(facts["scale"])
    stored = features(two_model_root, 0)
    assert {name: (rows.dtype, rows.ndim) for name, rows in stored.items()} == {
        "features": (torch.float16, 3),
        "second": (torch.float16, 3),
    }
    for row, sample in enumerate(samples(two_model_root).values()):
        record = sample.record
        one, other = (tensors["second"][k].double().numpy() for k in record.classes)
        vectors = stored["second"][row].double().numpy()
        weights = (vectors - other) @ (one - other) / np.sum((one - other) ** 2)
        np.testing.assert_allclose(record.agreement.weights, weights, atol=0.02, rtol=0.02)
        first_p = expit(float(facts["scale"]) * (np.array(record.weights) - 0.5))
        second_p = expit(float(facts["second_scale"]) * (np.array(record.agreement.weights) - 0.5))
        np.testing.assert_allclose(record.agreement.difference, abs(first_p - second_p), atol=1e-5)


def test_annotating_stored_features_loads_no_clip(two_model_root, monkeypatch):
    config = load_settings(AnnotationConfig, two_model_root.plan.config["annotation"])
    model = build_annotator(config, two_model_root.store.get(PROTOTYPES), device="cpu")
    monkeypatch.setattr("semix.pipeline.clip.ClipEncoder", None)
    groups = [plan_of(two_model_root).group(index) for index in range(5)]
    result = model.annotate(features(two_model_root, 0), groups)
    for labels, sample in zip(result, samples(two_model_root).values(), strict=True):
        np.testing.assert_allclose(labels.weights, sample.record.weights, atol=0.02, rtol=0.02)


def test_the_plan_names_both_models_and_a_change_of_the_second_is_refused(
    two_model_root, second_clip, hasty_config, tmp_path
):
    identity = two_model_root.plan.models["annotation"]
    assert set(identity["second"]["files"]) == set(identity["files"])
    weights = "open_clip_model.safetensors"
    assert identity["second"]["files"][weights] != identity["files"][weights]
    shutil.copytree(second_clip, tmp_path / "clip")
    config = altered(hasty_config, second(tmp_path / "clip"))
    root = create_root(config, str(tmp_path / "root"))
    root.store.create("shards/0000/0000000.json", b"{}")  # else another plan takes its place
    settings = tmp_path / "clip" / "open_clip_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text())))
    with pytest.raises(InputError, match=r"annotation\.model = .*its files changed since"):
        create_root(config, str(tmp_path / "root"))


def test_both_models_count_in_the_cost(hasty_config, second_clip):
    alone, both = series_cost(hasty_config), series_cost(altered(hasty_config, second(second_clip)))
    assert both.clip == 2 * alone.clip
    assert both.feature_width == 2 * alone.feature_width


def test_prototypes_without_the_second_model_are_refused(hasty_config, tmp_path):
    root = begun(hasty_config, tmp_path / "root")
    other = EncoderConfig(model="ViT-B-32-quickgelu", pretrained="laion400m_e32")
    config = hasty_config.annotation.model_copy(update={"second": other})
    with pytest.raises(ValueError, match="have no measurement of the second encoder; measure it"):
        build_annotator(config, root.store.get(PROTOTYPES), device="cpu")


def test_a_bad_second_model_is_named_before_anything_is_made(hasty_config, tmp_path):
    wrong = altered(hasty_config, "annotation.second={model: ViT-B-33, pretrained: openai}")
    with pytest.raises(InputError, match=r"annotation\.second\.model = ViT-B-33: open_clip has no"):
        create_root(wrong, str(tmp_path / "root"))
