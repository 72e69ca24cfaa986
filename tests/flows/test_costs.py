import shutil

import pytest
import torch
from safetensors.numpy import load_file, save_file

from semix.data.errors import InputError
from semix.data.formats import PROTOTYPES
from semix.data.settings import load_settings
from semix.data.store import Store
from semix.data.tensors import seal
from semix.flows.build import check
from semix.flows.costs import amount, free_bytes, readable
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import ensure_prototypes, read_prototypes
from semix.pipeline.shard import generate_shard, load_models
from tests.emulated_cuda import emulated_cuda
from tests.pipeline.roots import create_root, plan_of


def altered(config: BuildConfig, *overrides: str) -> BuildConfig:
    return load_settings(BuildConfig, config.model_dump(), overrides)


def test_a_model_that_is_not_here_has_no_cost(hasty_config, tmp_path):
    model = ("generator.model=owner/model", f"generator.revision={'a' * 40}")
    facts = check(altered(hasty_config, *model), str(tmp_path), rate=1)
    unknown = ("tflop", "hours", "bytes", "network_rows")
    assert [facts[key] for key in unknown] == [None] * len(unknown)
    assert facts["unknown"].startswith("generator.model = owner/model: is not on this machine")
    assert (facts["groups"], facts["noise_rows"]) == (45, 0)
    texts = readable(facts)
    assert texts["TFLOP"] == texts["network calls"] == "not known"
    assert texts["not known"] == facts["unknown"]
    assert texts["hours"] == "not known, at 45% of 1 TFLOP/s (cpu, float32, as given)"


def test_a_model_that_lacks_a_weight_is_refused(hasty_config, tmp_path):
    folder = shutil.copytree(hasty_config.generator.model, tmp_path / "model")
    (weights,) = (folder / "text_encoder").glob("*.safetensors")
    tensors = load_file(weights)
    lacking = next(name for name in tensors if "v_proj.weight" in name)
    del tensors[lacking]
    save_file(tensors, weights)
    message = rf"^generator\.model = .*/text_encoder: lacks 1 of .* \({lacking}\); fetch or"
    with pytest.raises(InputError, match=message):
        check(altered(hasty_config, f"generator.model={folder}"), str(tmp_path / "out"), rate=1)


def test_a_place_that_is_too_small_is_refused(hasty_config, tmp_path):
    config = altered(hasty_config, "mixing.groups_per_pair=2000000")
    message = r"^out = .+/x: has .+ free, and what is missing takes about .+ TB; choose another"
    with pytest.raises(InputError, match=message):
        check(config, str(tmp_path / "x"), rate=1)


def test_memory_has_no_free_space_to_speak_of(hasty_config):
    config = altered(hasty_config, "mixing.groups_per_pair=2000000")
    facts = check(config, "memory://costs", rate=1)
    assert facts["free_bytes"] is None
    assert readable(facts)["bytes"].endswith(" TB")


def test_a_scale_that_was_measured_and_makes_labels_nearly_hard_is_said(
    hasty_config, tmp_path, caplog
):
    config = altered(hasty_config, "annotation.scale=auto")
    root = create_root(config, str(tmp_path))
    ensure_prototypes(build_of(root), device="cpu")
    prototypes, facts = read_prototypes(root)
    for scale, warned in (("4.0", False), ("12.0", True)):
        caplog.clear()
        content = seal({"prototypes": prototypes}, facts | {"scale": scale})
        root.store.put(PROTOTYPES, content)
        check(config, str(tmp_path), rate=1)
        assert ("such labels are nearly hard" in caplog.text) == warned


def test_only_what_is_missing_needs_space(hasty_config, tmp_path):
    root = create_root(hasty_config, str(tmp_path))
    ensure_prototypes(build_of(root), device="cpu")
    plan = plan_of(root)
    models = load_models(plan, root.store.get(PROTOTYPES), device="cpu")
    generate_shard(plan.shard(3), plan, models=models, root=root).publish()
    facts = check(hasty_config, str(tmp_path), rate=1)
    assert (facts["shards"], facts["missing"]) == (8, 7)
    assert readable(facts)["missing"] == "7 shards"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"share": 0.0},
            r"^share = 0\.0: give a share of the device's rate, above 0 and at most 1",
        ),
        ({"share": 1.01}, r"^share = 1\.01: give a share"),
        ({"rate": -1.0}, r"^rate = -1\.0: give the device's TFLOP/s, above 0"),
    ],
)
def test_what_is_asked_must_make_sense(hasty_config, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        check(hasty_config, str(tmp_path / "x"), **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is")
def test_a_device_that_is_not_here_is_refused(hasty_config, tmp_path):
    with pytest.raises(InputError, match=r"^device = cuda: torch sees no GPU here"):
        check(hasty_config, str(tmp_path / "x"), device="cuda")


def test_noise_that_costs_too_much_is_refused(hasty_config, tmp_path):
    config = altered(hasty_config, "noise.strategy=select")
    with pytest.raises(InputError, match="would cost 6 times what generating costs"):
        check(config, str(tmp_path / "x"), rate=1)


def test_a_check_leaves_nothing_behind(hasty_config, tmp_path):
    check(hasty_config, str(tmp_path / "a" / "b"), rate=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c").mkdir()
    check(hasty_config, str(tmp_path / "c"), rate=1)
    assert (tmp_path / "c").is_dir()


def test_free_space_of_a_place_that_is_not_there_yet(tmp_path):
    existing, later = Store(str(tmp_path)), Store(str(tmp_path / "a" / "b"))
    assert free_bytes(later) == pytest.approx(free_bytes(existing), rel=0.01)


def test_words_of_rows_flop_and_hours(hasty_config, tmp_path):
    facts = check(hasty_config, str(tmp_path), rate=1)
    words = readable(facts)
    # 7 shards of 6 series and one of 3, in batches of 4; 3 steps, guided, of 4 images.
    assert words["network calls"] == f"{(7 * 8 + 4) * 3 * 2 * 4:,} rows"
    assert words["TFLOP"] == f"{facts['tflop']:,.4g}"
    assert words["hours"].endswith(" on one device, at 45% of 1 TFLOP/s (cpu, float32, as given)")
    assert words["noise selection"] == "adds nothing"


def test_amounts():
    counts = (0, 999, 1_000, 999_600, 3.46e11, 6.4e13, 1.234e15)
    words = ["0 B", "999 B", "1 kB", "1 MB", "346 GB", "64 TB", "1,234 TB"]
    assert [amount(count) for count in counts] == words


def test_a_long_build_on_a_gpu_is_told_what_compiling_gains(hasty_config, tmp_path):
    def words(*overrides: str, rate: float, device: str = "cuda") -> dict[str, str]:
        config = altered(hasty_config, *overrides)
        return readable(check(config, str(tmp_path), rate=rate, device=device))

    assert "compile" not in words(rate=1e-6, device="cpu")
    with emulated_cuda():
        assert words(rate=1e-6)["compile"].startswith("none, which loses 15 to 35 % of a GPU's")
        assert "compile" not in words(rate=1)  # seconds
        assert "compile" not in words("generator.compile=full", rate=1e-6)
