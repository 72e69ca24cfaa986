"""The second stage: features, views, losses, which epoch is kept, and going on after a stop."""

import itertools
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from semix.calib import features
from semix.calib.checkpoint import latest_checkpoint, save_checkpoint
from semix.calib.config import TrainConfig
from semix.calib.divergence import Diverged
from semix.calib.features import HeadFeedback
from semix.calib.heads import SparsityController, build_head
from semix.calib.losses import build_loss
from semix.calib.metrics import calibration_metrics
from semix.calib.network import Classifier, Network, predict
from semix.calib.real_data import open_data
from semix.calib.real_images import decode
from semix.calib.stage_two import HeadStage
from semix.calib.stopping import Stopped
from semix.calib.training_data import TrainingData
from semix.data.errors import InputError
from semix.data.fingerprint import derived_seed
from tests.calib.runs import stop_after

EPOCHS = 4
BATCH = 17  # of 60 training images: 9 are left over

Make = Callable[..., HeadStage]


@pytest.fixture
def precision() -> str:
    return "no"


@pytest.fixture
def accelerator(precision: str) -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision=precision)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def configured(make_config: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """configured(*overrides): a head of 4 epochs on augmented images, and no mixed ones."""

    def make(*overrides: str) -> TrainConfig:
        head = (f"head.epochs={EPOCHS}", f"head.batch_size={BATCH}", "head.augment=true")
        return make_config("mixed=null", "loss.name=ce", *head, *overrides)

    return make


@pytest.fixture(scope="module")
def data(configured: Callable[..., TrainConfig]) -> TrainingData:
    return open_data(configured())


@pytest.fixture
def network(configured: Callable[..., TrainConfig], data: TrainingData) -> Network:
    """An untrained network whose batch norms have statistics of the training images."""
    torch.manual_seed(0)
    network = Network(configured(), data.num_classes)
    network.normalise.fit(data.train_histogram)
    network.train()(data.images("train").tensor)
    return network.eval()


@pytest.fixture
def make_stage(
    configured: Callable[..., TrainConfig],
    data: TrainingData,
    network: Network,
    accelerator: Accelerator,
) -> Make:
    """make_stage(*overrides): a stage before its first epoch."""

    def make(*overrides: str) -> HeadStage:
        config = configured(*overrides)
        return HeadStage(config, data, network=network, seed=0, accelerator=accelerator)

    return make


def trained(stage: HeadStage, epochs: range = range(EPOCHS)) -> HeadStage:
    for epoch in epochs:
        stage.train_epoch(epoch)
    return stage


def exported(stage: HeadStage, folder: Path) -> tuple[dict, dict[str, Tensor]]:
    stage.export(folder / "head.safetensors", digest="d")
    record = json.loads((folder / "head.json").read_text())
    return record, load_file(folder / "head.safetensors")


def assert_equal(first: HeadStage, second: HeadStage) -> None:
    assert first.history == second.history
    tensors_by_module = [stage.tensors() for stage in (first, second)]
    assert tensors_by_module[0].keys() == tensors_by_module[1].keys()
    for name, tensors in tensors_by_module[0].items():
        torch.testing.assert_close(dict(tensors), dict(tensors_by_module[1][name]), rtol=0, atol=0)
    states = [stage.objects() for stage in (first, second)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("head.optimiser.name=adam", "head.optimiser.learning_rate=0.01"),
        ("head.mask_mode=preserve", "head.inference=expected", "head.select=ece"),
        ("head.mask_mode=preserve", "head.inference=last", "augment.shift=0"),
        ("head.loss.name=fedlas_ls", "head.views=3", "head.extra_pass=false"),
        ("head.loss.name=ada_focal",),  # learns from validation after each epoch
        ("head.loss.name=crl", "augment.shift=0"),  # keeps a history of each image
        ("head.method=tst",),
        ("head.method=vtst", "head.views=2"),
    ],
    ids=["reset", "expected", "last", "fedlas and views", "ada_focal", "crl", "tst", "vtst"],
)
def test_a_stopped_stage_goes_on_bit_for_bit(make_stage: Make, tmp_path: Path, overrides: tuple):
    """After two epochs, then after a step of the third."""
    unbroken, broken = trained(make_stage(*overrides)), trained(make_stage(*overrides), range(2))
    again = hand_over(broken, make_stage(*overrides), tmp_path / "epoch")
    with pytest.raises(Stopped):
        again.train_epoch(2, stop_after(steps=1))
    again = hand_over(again, make_stage(*overrides), tmp_path / "step")
    trained(again, range(2, EPOCHS))
    assert_equal(unbroken, again)
    assert exported(unbroken, tmp_path / "a")[0] == exported(again, tmp_path / "b")[0]


def hand_over(stage: HeadStage, other: HeadStage, folder: Path) -> HeadStage:
    """Pass the state on through a checkpoint alone: the global random state is changed."""
    save_checkpoint(folder, 2, tensors=stage.tensors(), objects=stage.objects(), state={})
    other.load(latest_checkpoint(folder))
    torch.manual_seed(99)
    return other


def test_the_very_first_epoch_can_be_stopped_before_any_is_the_best(
    make_stage: Make, tmp_path: Path
):
    unbroken, broken = trained(make_stage("head.select=ece")), make_stage("head.select=ece")
    with pytest.raises(Stopped):
        broken.train_epoch(0, stop_after(steps=2))
    again = hand_over(broken, make_stage("head.select=ece"), tmp_path)
    assert_equal(unbroken, trained(again))


def step_by_step(
    config: TrainConfig, network: Network, stage: HeadStage
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Train the head with the network inside the loop; returns its state, last-epoch features."""
    torch.manual_seed(derived_seed(0, "head weights"))
    head = build_head(config.head, network.num_features, 10)
    images, targets = stage.views.batches.images.tensor, stage.targets
    right = network(images)[0].argmax(1) == targets
    rule = SparsityController(
        config.head,
        base_accuracy=right.float().mean().item(),
        chance=0.1,
        seed=derived_seed(0, "masks"),
    )
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    optimiser = torch.optim.SGD(head.parameters(), **settings)
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(derived_seed(0, "head", epoch))
        head.start_epoch(rule.p, rule.generator)
        outcomes, features = [], []
        for batch in stage.views.batches.epoch(generator):
            with torch.no_grad():
                features.append(network.features(batch.images))
            logits = head.train()(features[-1])
            functional.cross_entropy(logits, batch.targets).backward()
            head.after_backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 2.0)
            optimiser.step()
            optimiser.zero_grad()
            head.after_step()
            confidence, predicted = logits.detach().softmax(1).max(1)
            outcomes.append(torch.stack([(predicted == batch.targets).float(), confidence]))
        accuracy, confidence = torch.cat(outcomes, 1).mean(1).tolist()
        rule.end_epoch(accuracy=accuracy, confidence=confidence)
    return head.state_dict(), features


@pytest.mark.parametrize("shift", [0, 1])
def test_the_head_is_that_of_a_network_inside_the_loop(
    make_stage: Make, configured: Callable, network: Network, shift: int
):
    settings = (f"augment.shift={shift}", "head.extra_pass=false")
    stage = make_stage(*settings)
    expected, features = step_by_step(configured(*settings), network, stage)
    trained(stage)
    torch.testing.assert_close(dict(stage.head.state_dict()), dict(expected), rtol=0, atol=1e-5)
    order = stage.views.order(EPOCHS - 1)
    assert order.shape == (3, BATCH)
    views = stage.views.features_of_epoch(EPOCHS - 1)[order]
    torch.testing.assert_close(views, torch.stack(features), rtol=0, atol=1e-5)


def test_as_many_views_as_epochs_are_new_changes_every_epoch(make_stage: Make):
    fresh, views = trained(make_stage()), trained(make_stage(f"head.views={EPOCHS}"))
    assert_equal(fresh, views)


def test_each_view_is_made_once_and_used_in_turn(make_stage: Make):
    passes = []
    two = make_stage("head.views=2").views
    two.network.backbone.features.register_forward_hook(lambda *_: passes.append(1))
    views = [two.features_of_epoch(epoch) for epoch in range(5)]
    assert views[0] is views[2] is views[4]
    assert views[1] is views[3]
    assert len(passes) == 2 * 2  # the batches of a view, then the remainder that fills no batch
    fresh = make_stage().views
    fresh_views = [fresh.features_of_epoch(epoch) for epoch in range(3)]
    for epoch in (0, 1):
        torch.testing.assert_close(views[epoch], fresh_views[epoch], rtol=0, atol=0)
    assert (fresh_views[2] - fresh_views[0]).abs().max() > 0.01
    former = weakref.ref(fresh.features_of_epoch(3))
    fresh.features_of_epoch(4)
    assert former() is None  # of new views, only one is in memory at a time
    moved = (two.unaugmented() - fresh_views[0]).abs().amax(1) > 0.01
    remainder = torch.ones(60, dtype=torch.bool).index_fill(0, two.order(0).flatten(), False)
    assert remainder.sum() == 60 - 3 * BATCH
    # A shift by 1 at most leaves one image in nine where it is.
    assert moved[remainder].float().mean() > 0.6
    assert 0.6 < moved[~remainder].float().mean() < 1


def test_a_view_that_is_being_made_can_be_stopped(make_stage: Make, monkeypatch):
    stage = trained(make_stage(), range(1))
    monkeypatch.setattr(type(stage.views), "pass_size", BATCH)
    with pytest.raises(Stopped):
        stage.train_epoch(1, stop_after(steps=1))
    assert stage.mid_epoch is None
    assert trained(stage, range(1, EPOCHS)).history == trained(make_stage()).history


def test_features_are_made_once_where_nothing_is_augmented(make_stage: Make, data: TrainingData):
    views = make_stage("augment.shift=0").views
    features = views.features_of_epoch(0)
    assert features is views.features_of_epoch(3) is views.unaugmented()
    expected = views.network.features(data.images("train").tensor)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)


def test_images_are_augmented_for_the_head_where_it_asks(make_stage: Make, make_config: Callable):
    assert not make_config().head.augment  # MaC-Cal's paper
    assert make_config("head.method=tst").head.augment  # TST's code
    views = make_stage("head.augment=false").views
    unchanged = make_stage("augment.shift=0").views.features_of_epoch(0)
    assert views.features_of_epoch(0) is views.features_of_epoch(3)
    torch.testing.assert_close(views.features_of_epoch(0), unchanged, rtol=0, atol=0)
    assert (make_stage().views.features_of_epoch(0) - unchanged).abs().max() > 0.01


def test_a_summed_loss_is_a_mean_at_a_learning_rate_of_a_batch_more(make_stage: Make):
    rule = "momentum: 0, weight_decay: 0, clip_norm: null"
    summed = make_stage("head.reduction=sum", f"head.optimiser={{learning_rate: 0.001, {rule}}}")
    mean = make_stage(f"head.optimiser={{learning_rate: {0.001 * BATCH}, {rule}}}")
    assert summed.train_epoch(0) == pytest.approx(mean.train_epoch(0), rel=1e-4)
    weights = [dict(stage.head.state_dict()) for stage in (summed, mean)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_a_head_that_ends_at_chance_is_no_result(make_stage: Make):
    stage = make_stage("head.optimiser.learning_rate=1e-12")
    stage.objective.controller.base_accuracy = 0.9
    trained(stage, range(EPOCHS - 1))
    text = r"^the masked head is right in [\d.]+ % of training images, as by chance; raise"
    with pytest.raises(Diverged, match=text):
        stage.train_epoch(EPOCHS - 1)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_network_and_its_batch_norms_stay_as_they_are(
    make_stage: Make, network: Network, shift: int
):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    stage = trained(make_stage(f"augment.shift={shift}"), range(2))
    torch.testing.assert_close(dict(network.state_dict()), before, rtol=0, atol=0)
    weight, mask = stage.head.layer1.weight, stage.head.mask1
    # In the second epoch momentum pulls at weights that are masked now.
    torch.testing.assert_close(weight[~mask], torch.zeros_like(weight[~mask]), rtol=0, atol=0)
    assert (weight[mask] != 0).any()


@pytest.mark.parametrize("precision", ["bf16"])
def test_features_are_made_in_the_chosen_precision_and_kept_in_float32(
    make_stage: Make, network: Network
):
    stage = make_stage()
    view = stage.views.unaugmented()
    exact = network.features(stage.views.batches.images.tensor)
    assert view.dtype == torch.float32
    assert 1e-4 < (view - exact).abs().max() < 0.2
    metrics = stage.train_epoch(0)
    assert metrics["loss"] > 0
    assert {parameter.dtype for parameter in stage.objective.parameters()} == {torch.float32}


def test_features_that_do_not_fit_are_refused_before_any_is_made(
    make_stage: Make, network: Network, monkeypatch: pytest.MonkeyPatch
):
    passes = []
    network.backbone.features.register_forward_hook(lambda *_: passes.append(1))
    view = 60 * network.num_features * 4
    monkeypatch.setattr(features, "MEMORY_LIMIT", 3 * view)
    make_stage("head.views=3")
    make_stage("head.views=4", "head.epochs=3")  # the fourth is never made
    passes.clear()
    with pytest.raises(InputError, match=r"^head\.views = 4: .* of 60 images .* at most 3$"):
        make_stage("head.views=4")
    monkeypatch.setattr(features, "MEMORY_LIMIT", view - 1)
    with pytest.raises(InputError, match=r"^head\.views = None: .* smaller real\.train_per_class"):
        make_stage()
    assert passes == []


def test_an_extra_pass_measures_the_head_as_it_is_used(make_stage: Make):
    options = ("head.mask_mode=preserve", "head.inference=expected")
    plain, extra = make_stage(*options, "head.extra_pass=false"), make_stage(*options)
    running, metrics = plain.train_epoch(0), extra.train_epoch(0)
    logits = extra.head.eval()(extra.views.features_of_epoch(0))
    confidence, predicted = logits.softmax(1).max(1)
    assert metrics["accuracy"] == pytest.approx((predicted == extra.targets).float().mean().item())
    assert metrics["confidence"] == pytest.approx(confidence.mean().item(), rel=1e-6)
    assert metrics["loss"] == running["loss"]
    assert abs(metrics["confidence"] - running["confidence"]) > 1e-3
    line = extra.objective.controller.history[0]
    assert (line["accuracy"], line["confidence"]) == (metrics["accuracy"], metrics["confidence"])


@pytest.mark.parametrize(
    ("method", "measure"), [("mac_cal", "ece"), ("tst", "nll"), ("vtst", "nll")]
)
def test_the_epoch_that_validation_likes_best_is_kept(
    make_stage: Make, data: TrainingData, tmp_path: Path, method: str, measure: str
):
    options = (f"head.method={method}", f"head.select={measure}", "head.optimiser.name=sgd")
    stage = trained(make_stage(*options, "head.optimiser.learning_rate=3"))  # it gets worse
    record, tensors = exported(stage, tmp_path)
    values = [line[f"validation_{measure}"] for line in record["history"]]
    best = values.index(min(values))
    assert record["epoch"] == best < EPOCHS - 1, "choose settings whose last epoch is not the best"
    stage.head.load_state_dict(tensors)
    classifier = Classifier(stage.network, stage.head).eval()
    split = data.real.validation
    logits = predict(classifier, decode(split), device=torch.device("cpu"))
    measures = calibration_metrics(logits, torch.from_numpy(split.targets)).as_dict()
    assert measures[measure] == pytest.approx(values[best], rel=1e-5)


def test_the_record_beside_the_head_tells_masks_and_history(make_stage: Make, tmp_path: Path):
    stage = trained(make_stage("head.p_start=0.7", "head.loss.name=fedlas_ls"))
    record, tensors = exported(stage, tmp_path)
    history = record["history"]
    assert [line["epoch"] for line in history] == list(range(EPOCHS))
    assert history[0]["p"] == 0.7
    assert {"delta", "loss", "accuracy", "confidence", "smoothing"} <= history[1].keys()
    for before, after in itertools.pairwise(history):
        assert abs(after["p"] - before["p"]) <= before["delta"] + 1e-12
    assert record["p"] == pytest.approx(history[-1]["p"])
    assert record["epoch"] == EPOCHS - 1
    assert record["kept_weights"] == {
        name: pytest.approx(tensors[name].float().mean().item()) for name in ("mask1", "mask2")
    }
    assert (record["method"], record["select"], record["digest"]) == ("mac_cal", "last", "d")


def test_the_loss_of_the_head_sees_the_features_and_learns_outside_the_clipping(make_stage: Make):
    stage = make_stage(
        "head.loss={name: fedlas_ls, momentum: 1, smoothing: 0.5}",
        "head.optimiser={learning_rate: 1, momentum: 0, weight_decay: 0, clip_norm: 1e-9}",
    )
    head = [p.detach().clone() for p in stage.head.parameters()]
    gate = [p.detach().clone() for p in stage.loss.parameters()]
    stage.objective.controller.p = 1.0  # no weight is masked, which would move it
    stage.train_epoch(0)
    for now, before in zip(stage.head.parameters(), head, strict=True):
        torch.testing.assert_close(now.detach(), before, rtol=0, atol=1e-7)
    moved = [(a - b).abs().max().item() for a, b in zip(stage.loss.parameters(), gate, strict=True)]
    assert max(moved) > 1e-4
    # With momentum 1 the running norm is that of the last batch.
    last = stage.views.features_of_epoch(0)[stage.views.order(0)[-1]]
    torch.testing.assert_close(stage.loss.norm_mean, last.abs().sum(1).mean()[None])
    assert stage.loss.norm_batches.item() == stage.steps == 3


def test_a_loss_learns_from_validation_after_every_epoch(make_stage: Make):
    stage = trained(make_stage("head.loss.name=ada_focal"), range(1))
    expected = build_loss("ada_focal", 10)
    before = expected.gammas.clone()
    expected.end_epoch(HeadFeedback(stage.head, stage.unaugmented))
    torch.testing.assert_close(stage.loss.gammas, expected.gammas, rtol=0, atol=0)
    assert (expected.gammas != before).any()


def test_feedback_is_what_the_whole_classifier_says(make_stage: Make, data: TrainingData):
    stage = trained(make_stage("head.method=vtst"), range(1))
    stage.head.train()
    feedback = HeadFeedback(stage.head, stage.unaugmented)
    classifier = Classifier(stage.network, stage.head)
    for split in ("train", "validation"):
        outputs = feedback.outputs(split)
        assert stage.head.training
        assert feedback.outputs(split) is outputs
        images = decode(getattr(data.real, split))
        expected = predict(classifier.eval(), images, device=torch.device("cpu"))
        stage.head.train()
        torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=1e-5)
        assert outputs.targets.tolist() == getattr(data.real, split).targets.tolist()


def test_every_epoch_draws_latents_of_its_own(make_stage: Make):
    stage, seeds = make_stage("head.method=vtst"), []
    for epoch in (0, 1, 0):
        stage.train_epoch(epoch)
        seeds.append(torch.initial_seed())
    assert seeds[0] == seeds[2] != seeds[1]


def test_a_diverged_head_is_refused(make_stage: Make):
    stage = make_stage(
        "head.optimiser={learning_rate: 1e30, clip_norm: null, momentum: 0, weight_decay: 0}"
    )
    with pytest.raises(Diverged, match=r"NaN or infinite; lower head\.optimiser\.learning_rate"):
        trained(stage)
