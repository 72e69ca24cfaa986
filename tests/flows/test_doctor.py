import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from prefect.client.orchestration import get_client
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from semix.data.errors import InputError
from semix.data.formats import LabelSetRecord, SeriesLabels
from semix.data.label_sets import create_set
from semix.data.machine import MemoryLimit
from semix.data.real import DIGITS
from semix.flows import gpus
from semix.flows.cli import app
from semix.flows.doctor import (
    DoctorInput,
    available_memory,
    check_device,
    doctor_input,
    examine,
    memory_finding,
    server_finding,
)
from semix.flows.server_probe import ServerFacts
from tests import handmade
from tests.s3 import s3_client


@pytest.fixture
def config_file(hasty_config, tmp_path):
    path = tmp_path / "build.json"  # JSON is YAML
    path.write_text(json.dumps(hasty_config.model_dump(mode="json")))
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home for Prefect, without a server."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    with temporary_settings({PREFECT_HOME: tmp_path / "home"}, restore_defaults={PREFECT_API_URL}):
        yield tmp_path / "home"


def doctor(*arguments):
    """Exit status and findings by check."""
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    rows = json.loads(result.stdout)["findings"]
    return result.exit_code, {row["check"]: row for row in rows}


def everything_below(root_folder):
    return sorted(map(str, Path(root_folder).rglob("*")))


def test_a_machine_that_can_build_passes_and_nothing_is_left(config_file, home, tmp_path):
    before = everything_below(tmp_path)
    status, rows = doctor(config_file, "--out", tmp_path / "there" / "mixed")
    failures = {name: row for name, row in rows.items() if row["state"] == "failed"}
    assert status == 0 and not failures
    assert "write, read and delete work" in rows["store"]["found"]
    assert rows["store"]["found"].endswith("B free")
    assert "the weights take" in rows["memory"]["found"]
    assert rows["real images"]["found"].startswith("10 classes")
    assert "PREFECT_API_URL is not set" in rows["Prefect server"]["found"]
    assert everything_below(tmp_path) == before


def test_a_bucket_is_tried_and_left_as_it_was(home, bucket, s3_server):
    status, rows = doctor("--out", f"{bucket}/mixed")
    assert status == 0 and rows["store"]["state"] in ("ok", "warning")  # a busy machine is slow
    assert "free" not in rows["store"]["found"]
    assert "KeyCount" not in (answer := list_objects(bucket, s3_server)) or not answer["KeyCount"]


def list_objects(bucket, endpoint):
    return s3_client(endpoint).list_objects_v2(Bucket=bucket.removeprefix("s3://"))


def test_a_bucket_that_refuses_writes_is_named(home, bucket, faulty_s3):
    faulty_s3.fail(errors=1.0, methods=["PUT"])
    status, rows = doctor("--out", f"{bucket}/mixed")
    assert status == 1 and rows["store"]["state"] == "failed"
    assert "choose another place" in rows["store"]["remedy"]


def test_a_bucket_that_is_not_there_is_named(home, bucket):
    status, rows = doctor("--out", "s3://no-such-bucket-of-semix/mixed")
    assert status == 1
    assert rows["store"]["remedy"] == "there is no such bucket; create it, or correct its name"


def test_a_folder_that_cannot_be_written_is_named(home):
    status, rows = doctor("--out", "/proc/mixed")
    assert status == 1
    assert "cannot be written" in rows["store"]["remedy"]


def test_another_protocol_is_named(home):
    status, rows = doctor("--out", "ftp://somewhere/mixed")
    assert status == 1 and "use one of file, s3" in rows["store"]["remedy"]


def test_models_that_are_missing_or_damaged_are_named(config_file, hasty_config, home, tmp_path):
    status, rows = doctor(config_file, "--set", f"generator.model={tmp_path / 'nowhere'}")
    assert status == 1 and "there is no such folder" in rows["models"]["remedy"]
    assert "weights" not in rows["memory"]["found"]  # there are none to tell of
    damaged = tmp_path / "damaged"
    shutil.copytree(hasty_config.generator.model, damaged)
    weights = next(damaged.glob("unet/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    status, rows = doctor(config_file, "--set", f"generator.model={damaged}")
    assert status == 1 and str(damaged) in rows["generator.model"]["found"]
    assert "is damaged" in rows["generator.model"]["remedy"]


def copy_model(config_file: Path, folder: Path, part: str) -> Path:
    """Copy the config's model to `folder`; returns the weights of one of its networks."""
    config = json.loads(config_file.read_text())
    shutil.copytree(config["generator"]["model"], folder)
    config["generator"]["model"] = str(folder)
    config_file.write_text(json.dumps(config))
    (weights,) = (folder / part).glob("*.safetensors")
    return weights


def test_a_licence_that_is_not_for_commercial_use_is_a_warning(config_file, hasty_config, home):
    _, rows = doctor(config_file)
    assert rows["licences"]["found"] == "generator unknown; annotation unknown"
    assert "licence" not in rows
    values = json.loads(config_file.read_text())
    model = config_file.parent / "model"
    shutil.copytree(hasty_config.generator.model, model)
    card = '---\nlicense: other\nlicense_name: "nc\\e[2J research"\n---\n'
    (model / "README.md").write_text(card)
    values["generator"]["model"] = str(model)
    config_file.write_text(json.dumps(values))
    status, rows = doctor(config_file)
    assert (status, rows["licence"]["state"]) == (0, "warning")
    assert "is not for commercial use" in rows["licence"]["found"]


@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
def test_a_network_that_lacks_a_weight_fails(config_file, home, tmp_path, part):
    weights = copy_model(config_file, tmp_path / "model", part)
    tensors = load_file(weights)
    lacking = min(tensors)
    save_file({name: tensors[name] for name in tensors if name != lacking}, weights)
    status, rows = doctor(config_file)
    assert status == 1 and rows["models"]["state"] == "failed"
    assert rows["models"]["found"] == f"generator.model = {tmp_path}/model/{part}"
    assert "lacks 1 of the weights of a " in rows["models"]["remedy"]
    assert f"({lacking})" in rows["models"]["remedy"]


def test_weights_of_one_variant_alone_fail_until_it_is_named(config_file, home, tmp_path):
    weights = copy_model(config_file, tmp_path / "model", "unet")
    weights.rename(weights.with_suffix(".fp16.safetensors"))
    status, rows = doctor(config_file)
    assert (status, rows["models"]["found"]) == (1, "generator.variant = nothing")
    assert rows["models"]["remedy"].endswith("alone; set it to fp16")
    status, rows = doctor(config_file, "--set", "generator.variant=fp16")
    assert status == 0 and "models" not in rows


def test_quantised_weights_that_cannot_be_loaded_fail(config_file, home, tmp_path):
    settings = copy_model(config_file, tmp_path / "model", "unet").with_name("config.json")
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"quantization_config": {"quant_method": "quanto"}}))
    status, rows = doctor(config_file)
    assert (status, rows["models"]["state"]) == (1, "failed")
    assert "quantised by quanto; semix takes those of bitsandbytes" in rows["models"]["remedy"]


def test_a_clip_that_is_not_there_is_told_once(config_file, home):
    for name in ("no-such-clip", "local-dir:no/such/folder"):
        status, rows = doctor(config_file, "--set", f"annotation.model={name}")
        failed = [check for check, row in rows.items() if row["state"] == "failed"]
        assert status == 1 and failed == ["models"]
    assert rows["models"]["found"] == f"annotation.model = {Path('no/such/folder').absolute()}"
    assert rows["models"]["remedy"] == "there is no such folder"


def test_a_pinned_hub_model_that_was_not_fetched_is_told(config_file, home, monkeypatch):
    hub = ("--set", "generator.model=nobody/no-model", "--set", f"generator.revision={'a' * 40}")
    status, rows = doctor(config_file, *hub)
    assert status == 0 and "`hf download`" in rows["generator.model"]["remedy"]
    assert "weights" not in rows["memory"]["found"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, rows = doctor(config_file, *hub)
    assert status == 1 and "unset HF_HUB_OFFLINE" in rows["generator.model"]["remedy"]


def test_named_clip_weights_that_were_not_fetched_are_told(
    config_file, home, monkeypatch, tmp_path
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    overrides = ("annotation.model=ViT-B-32-quickgelu", "annotation.pretrained=openai")
    clip = [argument for override in overrides for argument in ("--set", override)]
    status, rows = doctor(config_file, *clip)
    assert status == 0 and rows["annotation.pretrained"]["state"] == "warning"
    assert "the first run fetches it" in rows["annotation.pretrained"]["remedy"]
    assert "weights" not in rows["memory"]["found"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, rows = doctor(config_file, *clip)
    assert status == 1 and "unset HF_HUB_OFFLINE" in rows["annotation.pretrained"]["remedy"]
    repository = tmp_path / "hub" / "models--timm--vit_base_patch32_clip_224.openai"
    file = repository / "snapshots" / "c0ffee" / "open_clip_model.safetensors"
    for path, content in ((repository / "refs" / "main", "c0ffee"), (file, "")):
        path.parent.mkdir(parents=True)
        path.write_text(content)
    save_file({"logit_scale": np.zeros(1000, np.float32)}, file)
    status, rows = doctor(config_file, *clip)
    assert status == 0 and str(file) in rows["annotation.pretrained"]["found"]
    assert "the weights take" in rows["memory"]["found"]


def test_a_clip_checkpoint_is_found_by_its_path(config_file, home, tmp_path):
    file = tmp_path / "clip.safetensors"
    save_file({"logit_scale": np.zeros(1000, np.float32)}, file)
    overrides = ("annotation.model=ViT-B-32-quickgelu", f"annotation.pretrained={file}")
    status, rows = doctor(config_file, *[a for override in overrides for a in ("--set", override)])
    assert status == 0 and str(file) in rows["annotation.pretrained"]["found"]
    assert "the weights take" in rows["memory"]["found"]
    (tmp_path / "clip.pt").write_bytes(bytes(3000))
    overrides = ("annotation.model=ViT-B-32-quickgelu", f"annotation.pretrained={tmp_path}/clip.pt")
    status, rows = doctor(config_file, *[a for override in overrides for a in ("--set", override)])
    assert status == 1 and "is no safetensors file" in rows["models"]["remedy"]


def test_real_images_that_are_not_there_are_named(config_file, home, tmp_path):
    options = ("--set", "real.name=imagefolder", "--set", f"real.path={tmp_path / 'none'}")
    status, rows = doctor(config_file, *options)
    assert status == 1 and rows["pictures"]["remedy"] == "there is no such folder"
    assert "real images" not in rows  # which opens the same folder


def test_pictures_that_cannot_be_decoded_fail_and_others_are_told(config_file, home, tmp_path):
    for name in ("seven", "eight"):
        for number in range(10):
            picture = tmp_path / "own" / name / f"{number}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9), (number, 0, 0)).save(picture)
    (picture.parent / "10.heic").write_bytes(b"")
    options = ("--set", "real.name=imagefolder", "--set", f"real.path={tmp_path / 'own'}")
    status, rows = doctor(config_file, *options)
    assert status == 0
    assert rows["picture folder"]["found"].startswith("ignored beside 20 images: 1 .heic; ")
    assert rows["pictures"]["found"] == "20 of 20 can be decoded"
    picture.write_bytes(picture.read_bytes()[:45])
    status, rows = doctor(config_file, *options)
    assert status == 1 and rows["pictures"]["state"] == "failed"
    assert "eight/9.png: image file is truncated" in rows["pictures"]["remedy"]


def test_all_that_is_wrong_with_pictures_is_named_at_once(config_file, home, tmp_path):
    for name in ("seven", "eight", "nine", "ten"):
        (tmp_path / "own" / name).mkdir(parents=True)
    for number in range(3):
        (tmp_path / "own" / "seven" / f"{number}.png").write_bytes(b"")
        (tmp_path / "own" / "eight" / f"{number}.tif").write_bytes(b"II*\0")
        (tmp_path / "own" / "nine" / f"{number}.heic").write_bytes(b"")
    options = ("--set", "real.name=imagefolder", "--set", f"real.path={tmp_path / 'own'}")
    status, rows = doctor(config_file, *options)
    assert status == 1 and rows["pictures"]["state"] == rows["real images"]["state"] == "failed"
    summary, *lines = rows["pictures"]["remedy"].splitlines()
    assert summary.startswith("6 of 6 images in ") and len(lines) == 6
    assert rows["real images"]["found"] == f"real.path = {tmp_path / 'own'}"
    remedy = (
        "classes 'nine' (3 .heic), 'ten' have no train images; add some, PNG, JPEG, WebP, TIFF,"
    )
    assert rows["real images"]["remedy"].startswith(remedy)


def test_a_precision_of_gpus_on_a_cpu_is_a_warning(config_file, home, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, rows = doctor(config_file, "--set", "generator.dtype=float16")
    assert status == 0 and rows["device"]["state"] == "warning"
    assert "or --set generator.dtype=float32" in rows["device"]["remedy"]
    _, rows = doctor("configs/quickstart/ce.yaml", "--set", "mixed_precision=bf16")
    assert rows["device"]["remedy"].endswith("or --set mixed_precision=no")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'NVIDIA-SMI has failed.'; echo more; exit 9", "nvidia-smi: NVIDIA-SMI has failed."),
        ("echo 'no library' >&2; exit 12", "nvidia-smi: no library"),
        ("exit 3", "nvidia-smi: exit status 3"),
        ("exec sleep 60", "nvidia-smi: no answer within 1 s"),
    ],
)
def test_a_broken_driver_is_no_missing_gpu(nvidia_smi, monkeypatch, script, told):
    monkeypatch.setattr(gpus, "ANSWER_S", 1.0)
    nvidia_smi(script)
    finding = next(check_device(DoctorInput()))
    assert (finding.check, finding.state, finding.found) == ("driver", "failed", told)
    assert "NVIDIA's driver" in finding.remedy


@pytest.mark.parametrize(
    ("script", "chosen", "states", "told"),
    [
        ("echo 'A, 80 GiB, 570'", None, ["ok", "failed"], "sees no GPU"),
        ("exit 6", "0", ["ok", "failed"], "sees no GPU"),
        ("exit 9", "0", ["failed", "failed"], "sees no GPU"),
        ("exit 9", "", ["warning", "ok"], "CPU alone"),
        ("echo A; echo B", "", ["ok", "warning"], "CUDA_VISIBLE_DEVICES hides its GPUs"),
    ],
)
def test_what_is_chosen_and_what_torch_sees_are_held_together(
    nvidia_smi, monkeypatch, script, chosen, states, told
):
    nvidia_smi(script)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    findings = list(check_device(DoctorInput()))
    assert [finding.state for finding in findings] == states
    assert told in findings[1].found


def test_without_a_driver_there_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = next(check_device(DoctorInput()))
    assert (finding.state, finding.found) == ("ok", "no NVIDIA GPU")


def test_a_limit_of_memory_is_told():
    """Whichever is nearer: what the machine has free, or the limit."""
    free, where = available_memory(MemoryLimit(8 * 10**9, 1000))
    finding = memory_finding("memory", free, 2000, where=where)
    assert finding.state == "failed" and "left of the limit of 8 GB (cgroup)" in finding.found
    assert available_memory(MemoryLimit(10**18, 10**18))[1] == "free"


def test_weights_beyond_the_memory_are_named():
    free = psutil.virtual_memory().available
    assert memory_finding("memory", free, free + 1e9).state == "failed"
    assert memory_finding("memory", free, 0.9 * free).state == "warning"
    assert memory_finding("memory", free, 0.1 * free).state == "ok"


def test_a_server_that_is_not_there_is_shown_without_its_secret(home):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://me:secret@127.0.0.1:9/api"}):
        result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "400"})
    assert result.exit_code == 1 and "secret" not in result.stdout
    assert "start it, or unset this" in result.stdout
    assert "1 of" in result.stdout and "checks failed" in result.stdout


def test_deployments_of_an_earlier_version_are_named(prefect_api):
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("semix-build")
        deployment = client.create_deployment(
            flow, "nightly", entrypoint="flows.build_flow.build_flow"
        )
        (outdated,) = [
            finding for finding in examine(DoctorInput()) if finding.check == "deployments"
        ]
        client.delete_deployment(deployment)
    assert outdated.state == "warning"
    assert outdated.found == "nightly: entry points of an earlier version, as flows.NAME"
    assert outdated.remedy == "deploy anew: prefect --no-prompt deploy --all"
    assert "deployments" not in {finding.check for finding in examine(DoctorInput())}


def test_a_server_that_answers_is_asked_for_its_version(prefect_api):
    findings = {finding.check: finding for finding in examine(DoctorInput())}
    assert findings["Prefect server"].state == "ok"
    assert "accepts our requests" in findings["Prefect server"].found


def test_a_server_whose_clock_is_off_is_told():
    facts = ServerFacts("http://host/api", version="3.6.28", clock_skew_s=4.0)
    assert server_finding(facts).state == "ok"
    finding = server_finding(replace(facts, clock_skew_s=-60.0))
    assert finding.state == "warning" and "-60 s off ours" in finding.found
    assert "timedatectl" in finding.remedy


def test_a_locked_database_is_named(home):
    home.mkdir()
    with sqlite3.connect(home / "prefect.db", isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        status, rows = doctor()
    assert status == 1 and "end the process that locks it" in rows["Prefect server"]["remedy"]


def test_a_training_run_is_recognised(home):
    status, rows = doctor("configs/quickstart/ce.yaml")
    assert status == 0 and rows["training"]["state"] == "ok"
    assert "lenet: 0.000652 GMAC per image of 32 pixels" in rows["network"]["found"]


def test_a_stem_that_does_not_fit_is_a_warning(home):
    status, rows = doctor("configs/quickstart/ce.yaml", "--set", "real.image_size=224")
    assert (status, rows["network"]["state"]) == (0, "warning")
    assert "the last map is larger than 16 x 16" in rows["network"]["remedy"]


@pytest.fixture
def training(tmp_path):
    """A config of digits and mixed ones, each with one partner; the first series runs backwards."""
    alphas = [0.0, 0.5, 1.0]
    samples = []
    for group in range(5):
        weights = alphas if group else alphas[::-1]
        pair = [2 * group, 2 * group + 1]
        labels = [[[pair[0], weight], [pair[1], 1 - weight]] for weight in weights]
        changes = {"classes": pair, "alphas": alphas, "weights": weights, "labels": labels}
        samples.append(handmade.sample(group, 3, side=32, **changes))
    root = handmade.root_of(tmp_path / "mixed", samples, DIGITS)
    for digest, labelled in (("ab12" * 16, True), ("cd34" * 16, False)):
        fields = {"annotation": {}, "encoders": {}, "features": "root", "batch": 1}
        labels = create_set(root, LabelSetRecord(digest=digest, plan=root.plan.digest, **fields))
        groups = [SeriesLabels(group=s.record.group, **s.record.label_fields()) for s in samples]
        if labelled:
            labels.commit(0, images=root.record(0).sha256, groups=groups)
    path = tmp_path / "train.yaml"
    settings = {"real": {"name": "digits"}, "mixed": {"url": root.url}}
    path.write_text(json.dumps({"name": "a", "model": {"name": "lenet"}, **settings}))
    return path


@pytest.mark.parametrize(
    ("override", "found", "remedy"),
    [
        ("mixed.labels=ab12ab12", "", ""),
        (
            "mixed.exclude.min_correlation=0",
            "mixed.exclude = min_correlation 0",
            "then has no group of class 'one'; ease",
        ),
        ("mixed.exclude.flagged=[still]", "exclude.flagged = still", "was not audited"),
        ("mixed.labels=cd34cd34", "mixed.labels = cd34cd34", "has no labels for 1 shards"),
        ("mixed.labels=ef56ef56", "mixed.labels = ef56ef56", ""),
        ("accumulate=5", "accumulate = 5", "do not divide into 5 equal parts"),
    ],
)
def test_what_a_training_would_refuse_is_named(home, training, override, found, remedy):
    status, rows = doctor(training, "--set", override)
    row = rows["training"]
    assert (status, row["state"]) == ((1, "failed") if found else (0, "ok"))
    assert found in row["found"] and remedy in row["remedy"]


def test_a_loop_is_checked_as_its_build_and_its_training(home, hasty_config, tmp_path):
    build = hasty_config.model_dump(mode="json", exclude_defaults=True)
    build.pop("real")
    values = {
        "name": "a loop",
        "real": {"name": "digits", "set_aside_per_class": 6},
        "build": build,
        "train": {"model": {"name": "lenet"}, "mixed": {"loss": "soft_ce"}},
        "series_per_pair": 1,
    }
    path = tmp_path / "loop.json"
    path.write_text(json.dumps(values))
    status, rows = doctor(path, "--out", tmp_path / "out")
    assert status == 0 and rows["generator.model"]["state"] == "ok"
    assert rows["training"]["state"] == "ok" and "240 to train" in rows["real images"]["found"]
    status, rows = doctor(path, "--set", "build.generator.model=nowhere")
    assert status == 1 and rows["models"]["state"] == "failed"
    _, rows = doctor(path, "--set", "build.generator.model=nowhere", "--set", "standins=true")
    assert rows["models"]["state"] == "not checked"


def test_a_run_that_judges_is_checked(config_file, home, training, tmp_path):
    pairs = f"mixing.pairs={{kind: confused, run: {tmp_path / 'nowhere'}}}"
    status, rows = doctor(config_file, "--set", pairs)
    assert status == 1 and rows["judge"]["found"] == f"run = {tmp_path / 'nowhere'}"
    status, rows = doctor(training, "--set", f"mixed.choose.run={tmp_path / 'nowhere'}")
    assert status == 1 and "there is no such folder" in rows["judge"]["remedy"]
    assert rows["training"]["state"] == "ok"


def test_settings_of_something_else_are_refused(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("colour: red")
    with pytest.raises(InputError, match="has no sections of a config; give"):
        doctor_input(str(path), [], "")
    with pytest.raises(InputError, match="overrides a config; give a config"):
        doctor_input("", ["a=1"], "")
