"""Settings of a training run, and what is refused before anything is read or written."""

import json
from inspect import signature
from pkgutil import resolve_name

import pytest

from semix.calib.check import check_config
from semix.calib.config import ShiftConfig
from semix.calib.config.loss import LOSSES
from semix.calib.config.method import METHODS
from semix.calib.config.model import MODELS
from semix.data.errors import InputError
from semix.data.real import DIGITS
from tests import handmade


def assert_refused(make_config, text, *overrides):
    with pytest.raises(InputError, match=text):
        check_config(make_config(*overrides))


def test_good_settings_pass(make_config):
    check_config(make_config())


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("loss.name=foo", r"^loss\.name = foo: choose one of ce, ls"),
        ("loss.smothing=0.1", r"^loss\.smothing: unknown setting; did you mean loss\.smoothing\?"),
        ("loss.smoothing=2", r"^loss\.smoothing = 2: input should be less than or equal to 0\.5"),
        (
            "model.name=resnet9",
            r"^model\.name = resnet9: did you mean resnet\d+\? choose one of .*resnet8, ",
        ),
        ("model.widht=4", r"^model\.widht: unknown setting; did you mean model\.width\?"),
        ("mixed.loss=l3", r"^mixed\.loss = 'l3': choose one of l2, soft_ce"),
        ("mixed.url=/nowhere", r"^mixed\.url = /nowhere: there is no such folder"),
        ("mixed.index=index/9.json", r"^mixed\.index = index/9\.json: is not in "),
        ("head.p_start=0.05", r"^head: `p_min` is 0\.1, above `p_start`, 0\.05"),
        ("head.loss.name=foo", r"^head\.loss\.name = foo: choose one of ce"),
        (
            "head.loss={name: fedlas_ls, beta: -1}",
            r"^head\.loss\.beta = -1: input should be greater than or equal to 0",
        ),
        ("head.inference=dense", r"^head: `inference` is dense: reset weights are already sparse"),
        ("augment.flip=true", r"^augment\.flip = True: a mirrored digit is no digit"),
        ("augment.shift=16", r"^augment\.shift = 16: stay below real\.image_size"),
    ],
)
def test_what_cannot_be_trained_is_named(make_config, override, text):
    assert_refused(make_config, text, override)


def test_views_of_what_is_not_augmented_are_named(make_config):
    text = r"^head\.views = 3: nothing is augmented.*; leave head\.views out"
    assert_refused(make_config, text, "augment.shift=0", "head={views: 3, method: tst}")
    text = r"^head\.views = 3: head\.augment is false.*; set it to true, or leave views out"
    assert_refused(make_config, text, "head.views=3")
    check_config(make_config("head.views=3", "head.augment=true"))


def test_other_classes_are_named_on_both_sides(make_config, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    assert_refused(
        make_config,
        r"^mixed\.url = .*: its classes are zero, one, .*; the real data's are cat, dog$",
        f"real={{name: imagefolder, path: {tmp_path}}}",
    )


def test_a_root_without_index_is_not_finished(make_config, tmp_path):
    plan = handmade.make_plan(1, 1, class_names=list(DIGITS))
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert_refused(make_config, r"^mixed\.url = .*: is not finished; run", f"mixed.url={tmp_path}")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("seeds=[1,1]", r"^seeds = \[1, 1\]: give each seed once"),
        ("seeds=[-1]", r"^seeds = \[-1\]: seeds are 0 or more"),
        ("bins=20", r"^bins: unknown setting; did you mean evaluation\.bins or evaluation\.shift"),
        ("smoothing=0.1", r"^smoothing: unknown setting; did you mean loss\.smoothing or head"),
        ("optimiser.lr=1", r"^optimiser\.lr: unknown setting"),
        ("epochs=0", r"^epochs = 0: "),
        ("head.hiden=3", r"^head\.hiden: unknown setting; did you mean head\.hidden\?$"),
        ("head.method=foo", r"^head\.method = foo: choose one of mac_cal, tst, vtst$"),
        ("head={method: vtst, latnt: 3}", r"^head\.latnt: .* did you mean head\.latent"),
        ("head={method: tst, gamma: 0.9}", r"^head\.gamma: unknown setting; known here"),
    ],
)
def test_values_out_of_range_are_named(make_config, override, text):
    with pytest.raises(InputError, match=text):
        make_config(override)


def test_identity_leaves_out_what_decides_no_weight(make_config):
    memory_settings = ("mixed.memory_gib=0", "mixed.cache_gib=1")
    same = make_config("name=other", "seeds=[5]", "checkpoint_every=9", *memory_settings).identity()
    assert same == make_config().identity()
    for override in (
        "loss.beta=1",
        "mixed.labels=abcdef",
        "mixed.exclude={monotone: true}",
        "head.gamma=0.7",
    ):
        assert make_config(override).identity() != same


def test_a_label_set_that_is_not_there_is_named(make_config):
    text = r"^mixed\.labels = abcdef: is no label set here"
    assert_refused(make_config, text, "mixed.labels=abcdef")


def test_a_part_of_a_heads_optimiser_leaves_the_rest_as_it_is(make_config):
    assert make_config("head.optimiser.learning_rate=0.01").head.optimiser.schedule == "constant"
    head = "head={method: tst, optimiser: {learning_rate: 0.01}}"
    optimiser = make_config(head).head.optimiser
    assert (optimiser.name, optimiser.weight_decay, optimiser.clip_norm) == ("adam", 0, None)


def test_each_part_has_its_settings_and_its_implementation():
    for kinds in (LOSSES, METHODS, MODELS):
        for name, kind in kinds.items():
            assert name in kind.names()
            assert (
                next(iter(signature(resolve_name(kind.implementation)).parameters)) == "num_classes"
            )


def test_what_was_not_given_is_no_part_of_the_identity(make_config):
    """So that a parameter that is new in semix leaves older runs as they are."""
    loss = make_config("loss={name: mbls, margin: 6}").identity()["loss"]
    assert loss == {"name": "mbls", "margin": 6}
    assert make_config("loss.name=ls", "loss.smoothing=0.05").loss.params == {"smoothing": 0.05}


def test_a_shift_can_be_switched_on_with_its_defaults(make_config):
    assert make_config("evaluation.shift=true").evaluation.shift == ShiftConfig()
    assert make_config("evaluation.shift=false").evaluation.shift is None


def test_no_mixed_precision_is_not_false(make_config):
    assert make_config("mixed_precision=no").mixed_precision == "no"  # YAML reads `no` as false


def test_the_mixing_ratio_takes_no_stored_labels(make_config):
    assert make_config("mixed.rule=mixing_ratio").mixed.rule == "mixing_ratio"
    for setting in ("scale=4", "labels=abc"):
        with pytest.raises(InputError, match="`rule: mixing_ratio` takes no stored labels; leave"):
            make_config("mixed.rule=mixing_ratio", f"mixed.{setting}")
