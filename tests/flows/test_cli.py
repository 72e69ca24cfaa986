"""The command line as a person runs it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import yaml
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner, Result

from semix.data.errors import InputError
from semix.data.formats import LeftOut, record_name
from semix.data.installation import DISTRIBUTION
from semix.data.leases import living
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.flows.cli import PANELS, app
from semix.flows.parameters import MORE_PANEL
from semix.pipeline.config import BuildConfig
from semix.pipeline.plan import build_of
from semix.pipeline.prototypes import ensure_prototypes
from tests.command import semix
from tests.data.whole_roots import commit_record, failure, prototypes
from tests.family import below
from tests.handmade import make_plan, make_root
from tests.pipeline.roots import create_root

CHECKOUT = Path(__file__).parents[2]
HEAVY = {"torch", "prefect", "diffusers", "transformers", "open_clip", "accelerate", "matplotlib"}


def start(*arguments: str, code: str = "", **environment: str) -> subprocess.Popen[str]:
    program = ["-c", code] if code else ["-m", "semix.flows.cli"]
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **environment},
    )


@pytest.fixture
def root(tmp_path):
    """A root of three shards whose first is committed and whose last has failed."""
    return root_of(tmp_path / "mixed", shards=3, committed=[0], failed=[2])


def root_of(folder: Path, *, shards: int, committed: list[int], failed: list[int]) -> Path:
    folder.mkdir()
    plan = make_plan(shards, 2 * shards, 3)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "prototypes.safetensors").write_bytes(prototypes())
    root = Root(str(folder))
    for shard in committed:
        facts = {"seconds": {"generate": 2.0, "encode": 1.25}, "wall_seconds": 3.0}
        record = commit_record(shard, **facts)
        root.store.put(record.tar, b"abc")
        root.store.put(record.features.name, b"abc")
        root.commit(record)
    for shard in failed:
        facts = {"error": "OSError", "message": "disk full", "traceback": ["..."] * 9}
        root.record_failure(failure(shard, **facts))
    return folder


@pytest.mark.process
def test_nothing_heavy_is_imported_to_show_help():
    out, _ = start(code="import semix.flows.cli, sys; print(*sys.modules)").communicate(timeout=120)
    assert not HEAVY & set(out.split())


def test_status_from_the_store_alone(root):
    _, out, _ = semix("status", str(root), "--json")
    assert "seconds" not in json.loads(out)
    _, out, _ = semix("status", str(root), "--full", "--json")
    counts = json.loads(out)
    assert [counts[key] for key in ("shards", "done", "missing", "failed")] == [3, 1, 2, 1]
    assert [counts[key] for key in ("images", "images_done")] == [18, 6]
    assert counts["images_per_second"] == 2.0  # 6 images in 3 s
    assert counts["worker_seconds_left"] == 6.0  # 12 images
    assert counts["stages"] == {"generate": 2.0, "encode": 1.25}


def test_status_for_people(root):
    _, out, _ = semix("status", str(root), "--full")
    lines = [line.split() for line in out.splitlines()]
    assert ["missing", "2"] in lines
    assert ["stages", "generate", "2", "s,", "encode", "1.2", "s"] in lines
    assert not any(line[0] == "left" for line in lines)
    opened = Root(str(root))
    lacking = opened.record(0).model_copy(
        update={"groups": 1, "left_out": [LeftOut(group=1, reason="image 0 is one flat value")]}
    )
    opened.store.put(record_name(0), lacking.written())
    _, out, _ = semix("status", str(root), "--full")
    assert ["left", "out", "1", "series"] in [line.split() for line in out.splitlines()]


def test_a_model_that_was_moved_is_named_with_where_to_say_so(hasty_config, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(hasty_config.generator.model, moved)
    config = load_settings(BuildConfig, hasty_config.model_dump(), [f"generator.model={moved}"])
    root = create_root(config, str(tmp_path / "mixed"))
    moved.rename(tmp_path / "away")
    status, out, err = semix("resume", root.url)
    assert (status, out) == (2, "")
    assert err == (
        f"error: generator.model = {moved}: there is no such folder; if it was moved: "
        f"semix resume {root.url} --set generator.model=PATH\n"
    )
    status, _, err = semix("resume", root.url, "--set", "mixing.seed=1")
    assert status == 2 and "only where things lie may change" in err


def test_failures_are_shown_with_their_reason(root):
    status, out, _ = semix("failures", str(root))
    assert (status, out.splitlines()[0]) == (0, "shard 2: OSError: disk full (1 attempt)")
    Root(str(root)).record_failure(failure(2, message="group 5: flat", group=5))
    _, out, _ = semix("failures", str(root))
    assert out.splitlines()[0] == "shard 2: ValueError: group 5: flat (group 5, 2 attempts)"
    _, out, _ = semix("failures", str(root), "--json")
    row = json.loads(out)["2"]
    assert (row["message"], row["attempts"], row["group"]) == ("group 5: flat", 2, 5)


def test_verify_finds_damage_and_says_so_in_its_exit_status(root):
    assert semix("verify", str(root))[:2] == (0, "1 shards as recorded\n")
    (root / "shards/0000/0000001-00000000.tar").write_text("xx")
    status, out, _ = semix("verify", str(root))
    assert status == 0
    assert out.splitlines()[0].startswith("orphan: shard 1: shards/0000/0000001-00000000.tar: no")
    assert out.splitlines()[1] == f"1 shards as recorded; 1 orphans, see `semix gc {root}`"
    (root / commit_record(0).tar).write_text("xx")
    (root / "prototypes.safetensors").write_text("xx")
    status, out, _ = semix("verify", str(root))
    assert status == 1
    assert out.splitlines()[-1].startswith("2 problems; `semix resume ")
    status, out, _ = semix("verify", str(root), "--json")
    assert status == 1
    problems = [
        (problem["shard"], problem["kind"], problem["damage"]) for problem in json.loads(out)
    ]
    assert problems == [(0, "shard", True), (1, "orphan", False), (None, "prototypes", True)]


def test_gc_shows_and_then_removes(root):
    orphan = root / "shards/0000/0000001-00000000.tar"
    orphan.write_text("xx")
    assert semix("gc", str(root))[1] == "0 files, 0 bytes can be removed with --remove\n"
    name = "shards/0000/0000001-00000000.tar"
    assert semix("gc", str(root), "--older-than", "0")[1].splitlines() == [
        f"{name}  2 bytes, no record names it",
        "1 files, 2 bytes can be removed with --remove",
    ]
    assert orphan.exists()
    status, out, _ = semix("gc", str(root), "--older-than", "0", "--remove", "--json")
    assert (status, json.loads(out)) == (
        0,
        [{"name": name, "bytes": 2, "why": "no record names it"}],
    )
    assert not orphan.exists()


def test_failed_shards_left_out_need_no_prefect(root):
    """Every missing shard has failed: none is tried, and the limit decides the outcome."""
    for shard in (1, 1):
        Root(str(root)).record_failure(failure(shard))
    status, _, err = semix("resume", str(root), "--skip-failed", "1")
    assert status == 1
    assert "error: 2 of 3 shards not made: 1-2" in err
    assert not (root / "index").exists()
    status, out, err = semix("resume", str(root), "--skip-failed", "67%", "--json")
    assert (status, json.loads(out)["missing"]) == (0, 2)
    assert "2 of 3 shards failed and are left out: 1-2; the index is without them" in err
    (shard,) = json.loads((root / "index/0.json").read_text())["shards"]
    assert shard["shard"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "none.yaml", "--out", "x"], "config = none.yaml: there is no such file"),
        (["build", "{config}", "--out", "x", "--set", "mixing.sed=1"], "did you mean mixing.seed?"),
        (["build", "{config}", "--out", "x"], "generator.model = /nowhere: there is no such"),
        (["status", "{folder}"], "holds no plan.json; start it with `semix build`"),
        (["resume", "{root}", "--shards", "2-5"], "shards = 3-5: this root has shards 0 to 2"),
        (["resume", "{root}", "--shards", "x"], "shards = x: write numbers and ranges"),
        (["resume", "{root}", "--skip-failed", "few"], "skip-failed = few: give a number of"),
        (["resume", "{root}", "--skip-failed", "1.5"], "skip-failed = 1.5: give a number of"),
        (["resume", "{root}", "--skip-failed", "2", "--retry-failed"], "drop one of the two"),
        (["resume", "{root}", "--cluster", "tcp://a:1"], "cluster = tcp://a:1: needs --runner"),
        (["resume", "{root}", "--range", "4/4"], "range = 4/4: write i/n with i from 0 to n - 1"),
        (["resume", "{root}", "--device", "cuda"], "device = cuda: no GPU is visible on this"),
        (["build", "s3x://a/b.yaml", "--out", "x"], "config = s3x://a/b.yaml: use one of file"),
        (["extend", "{root}"], "give a root and --groups-per-pair, or a root, --by-run"),
        (["show", "{root}", "6"], "group = 6: {root} has groups 0 to 5"),
        (
            ["browse", "{root}", "--groups", "3", "--out", "x.png"],
            "is not made yet; run `semix resume {root} --sh",
        ),
        (["build", "{config}", "--out", "s3x://a"], "url = s3x://a: use one of file"),
        (["build", "{config}", "--out", "x", "--check", "--share", "1.2"], "share = 1.2: give a"),
        (["build", "{config}", "--out", "x", "--time", "--rate", "0"], "rate = 0.0: give the dev"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(root, tmp_path, arguments, message):
    config = tmp_path / "config.yaml"
    values = {
        "real": {"name": "digits"},
        "generator": {"model": "/nowhere"},
        "mixing": {"groups_per_pair": 1},
        "annotation": {"model": "local-dir:/nowhere"},
    }
    config.write_text(yaml.safe_dump(values))
    paths = {"config": config, "folder": tmp_path, "root": root}
    status, out, err = semix(*(argument.format(**paths) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message.format(**paths) in err


@pytest.fixture(scope="module")
def config_file(hasty_config, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "build.yaml"
    path.write_text(yaml.safe_dump(hasty_config.model_dump(mode="json")))
    return path


TRAINING = {"real": {"name": "digits"}, "model": {"name": "resnet8", "width": 2}}
CONFIGS = {
    "train": {"name": "a", **TRAINING},
    "study": {
        "name": "a",
        "baseline": "ce",
        "base": TRAINING,
        "datasets": {"digits": {}},
        "methods": {"ce": {}},
    },
}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["build", "{build}", "--out", "{out}"], "mixed dataset"),
        (["build", "{build}", "--out", "{out}", "--check"], "mixed dataset"),
        (["train", "{train}", "--out", "{out}"], "training run"),
        (["study", "{study}", "--out", "{out}"], "study"),
        (["quickstart", "--out", "{out}"], "quickstart"),
    ],
)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cats/1.jpg", "picture"),
        ("config.json", '{"architectures": []}'),  # of a model
        ("unet/down/config.json", '{"architectures": []}'),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_was(
    config_file, tmp_path, arguments, kind, name, content
):
    paths = {"build": config_file, "out": tmp_path / "out"}
    for command, values in CONFIGS.items():
        paths[command] = tmp_path / f"{command}.yaml"
        paths[command].write_text(yaml.safe_dump(values))
    path = paths["out"] / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    before = sorted(paths["out"].rglob("*"))
    status, out, err = semix(*(argument.format(**paths) for argument in arguments))
    assert (status, out) == (2, "")
    first_name = name.partition("/")[0]
    message = (
        f"error: out = {paths['out']}: holds {first_name}, and is no {kind}; choose a new or an"
    )
    assert err.startswith(message)
    assert sorted(paths["out"].rglob("*")) == before and path.read_text() == content


def test_debug_shows_the_traceback(tmp_path):
    status, _, err = semix("status", str(tmp_path), "--debug")
    assert status == 2
    assert err.startswith("Traceback")
    assert "error: url = " in err.splitlines()[-1]


def test_a_report_takes_the_mixed_dataset_that_a_run_used(tmp_path):
    from semix.flows.report import mixed_of

    (tmp_path / "data.json").write_text('{"mixed": {"url": "/some/root"}}')
    assert mixed_of([tmp_path / "untrained", tmp_path]) == "/some/root"
    (tmp_path / "data.json").write_text('{"mixed": null}')
    assert mixed_of([tmp_path]) is None


def test_the_version_is_that_of_the_package():
    assert semix("--version") == (0, f"semix {version(DISTRIBUTION)}\n", "")


@pytest.mark.parametrize("command", ["browse {root}", "show {root} 0", "export {root} --to {to}"])
@pytest.mark.parametrize("kept", [0, 700])
def test_a_tar_that_is_cut_is_named_with_what_mends_it(root, tmp_path, command, kept):
    """The tar is replaced by zeros, none or 700 bytes."""
    name = commit_record(0).tar
    Root(str(root)).write_index()
    (root / name).write_bytes(bytes(kept))
    arguments = command.format(root=root, to=tmp_path / "to").split(" ")
    if arguments[0] == "browse":
        arguments += ["--groups", "0", "--out", str(tmp_path / "sheet.png")]
    status, out, err = semix(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and name in err
    remedy = f"`semix verify {root} --full` shows all damage, `semix resume {root} --full` mends it"
    assert err.splitlines()[-1] == remedy
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("browse {root} --out {file}/a.png", "--out = {file}/a.png: cannot be written (Not a dir"),
        ("browse {root} --out {folder}/no/a.png", "no folder {folder}/no; make it first, or name"),
        ("show {root} 0 --out {folder}/no/a.png", "no folder {folder}/no; make it first, or name"),
        ("browse {root} --out {folder}", "--out = {folder}: name a file that ends in .png or"),
        ("show {root} 0 --out {folder}/a.txt", "name a file that ends in .png or .webp"),
        ("export {root} --to {file}/a", "--to = {file}/a: cannot be written (Not a directory)"),
        ("report {folder} --out {folder}", "--out = {folder}: is a folder; name a file in it"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_first(root, tmp_path, command, remedy):
    paths = {"root": root, "folder": tmp_path, "file": root / "plan.json"}
    status, _, err = semix(*command.format(**paths).split(" "))
    assert (status, err.count("\n")) == (2, 1)
    assert remedy.format(**paths) in err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("command", "told"), [("status", False), ("resume", True)])
@pytest.mark.parametrize("end", [OSError("the network"), SystemExit(143)])
def test_only_what_goes_on_says_so(root, monkeypatch, command, told, end):
    def failing(root, url, **_):
        raise end

    monkeypatch.setattr("semix.data.root.Root.__init__", failing)
    status, _, err = semix(command, str(root))
    assert status in (1, 143)
    assert ("the same command goes on" in err) == told
    assert "not your input" not in err


@pytest.mark.process
def test_a_complete_root_needs_no_prefect(tmp_path):
    root = root_of(tmp_path / "mixed", shards=1, committed=[0], failed=[])
    code = (
        "import sys, semix.flows.cli\n"
        "try: semix.flows.cli.main()\n"
        "except SystemExit as end: print(end.code, 'prefect' in sys.modules, file=sys.stderr)"
    )
    out, err = start("resume", str(root), "--json", code=code).communicate(timeout=120)
    assert json.loads(out)["done"] == 1
    assert ": complete, nothing to do" in err
    assert err.splitlines()[-1] == "0 False"
    assert (root / "index/0.json").is_file()


def test_a_check_prints_what_a_build_will_take(config_file, hasty_config, tmp_path):
    from semix.pipeline.estimate import estimate
    from semix.pipeline.plan import BuildPlan

    arguments = ("--check", "--json", "--rate", "2", "--share", "0.5")
    status, out, err = semix("build", str(config_file), "--out", str(tmp_path / "x"), *arguments)
    assert status == 0, err
    facts = json.loads(out)
    expected = asdict(estimate(BuildPlan(hasty_config)))
    assert {key: facts[key] for key in expected} == expected
    assert (facts["classes"], facts["groups"], facts["shards"], facts["missing"]) == (10, 45, 8, 8)
    assert facts["hours"] == pytest.approx(facts["tflop"] / 3600)  # 1 TFLOP/s
    assert facts["free_bytes"] > facts["bytes"] > 0
    assert facts["timed"] is None
    assert not (tmp_path / "x").exists()


def test_a_check_decodes_every_picture(config_file, tmp_path):
    for name in ("seven", "eight"):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / f"own/{name}/{number}.png")
    options = ("--set", "real.name=imagefolder", "--set", f"real.path={tmp_path / 'own'}")
    options = (*options, "--set", "mixing.groups_per_pair=1", "--rate", "2", "--check")
    where = ("build", str(config_file), "--out", str(tmp_path / "x"))
    (tmp_path / "own/seven/10.heic").write_bytes(b"")
    status, _, err = semix(*where, *options)
    assert status == 0 and "20 real images can be decoded" in err
    assert "warning: ignored beside 20 images: 1 .heic" in err
    (tmp_path / "own/eight/3.png").write_bytes(b"<html>")
    status, out, err = semix(*where, *options)
    assert (status, out) == (2, "")
    assert f"error: real.skip_bad = 0: 1 of 20 images in {tmp_path / 'own'} cannot be" in err
    assert err.endswith(
        "\n  eight/3.png: it is HTML or XML, no PNG, JPEG, WebP, TIFF, BMP or GIF\n"
    )
    status, _, err = semix(*where, *options, "--set", "real.skip_bad=1")
    assert status == 0 and "19 real images can be decoded" in err
    assert not (tmp_path / "x").exists()


def test_a_check_for_people_and_one_warm_batch(config_file, tmp_path):
    arguments = ("--time", "--set", "noise.strategy=select", "--set", "noise.candidates=2")
    where = ("--out", str(tmp_path / "x"), "--device", "cpu")
    status, out, err = semix("build", str(config_file), *where, *arguments)
    assert status == 0, err
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert lines["network calls"] == "1,440 rows"
    # 2 candidates at 3 alphas, 3 steps there and 3 back, against 4 images of 3 guided steps.
    assert lines["noise selection"] == "adds 1.5 times the cost of generating (2,160 rows)"
    assert re.fullmatch(r".+ [kM]B, .+B free", lines["bytes"])
    assert re.search(r"at 45% of .+ TFLOP/s \(cpu, float32, measured\)", lines["hours"])
    assert re.match(r"16 images in .+ images/s, .+ TFLOP/s, ", lines["one warm batch"])
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def unfinished(hasty_config, tmp_path_factory) -> str:
    """A root with prototypes and no shards: more than a few seconds of work."""
    config = load_settings(BuildConfig, hasty_config.model_dump(), ["mixing.groups_per_pair=20"])
    root = create_root(config, str(tmp_path_factory.mktemp("unfinished")))
    ensure_prototypes(build_of(root))
    return root.url


def children(process: subprocess.Popen[str], module: str) -> list[psutil.Process]:
    return below(process.pid, module, direct=True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_workers_too(prefect_api, unfinished, until, alive, number, status):
    process = start("resume", unfinished, PREFECT_API_URL=prefect_api)
    until(lambda: len(living(Root(unfinished).store)) == 2)  # the plan is in use, a shard is made
    worker = children(process, "semix.pipeline.worker")[0]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert not alive(worker.pid)
    assert "Traceback" not in err


def test_nothing_survives_when_semix_is_killed(prefect_api, unfinished, until, alive):
    process = start("resume", unfinished, "--slots", "2")
    until(lambda: len(living(Root(unfinished).store)) == 3)  # the plan is in use
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert children(process, "semix.flows.run_server")
    assert len(children(process, "semix.pipeline.worker")) == 2
    process.kill()
    process.communicate()
    until(lambda: not any(alive(child.pid) for child in descendants), timeout_s=30)


# Help and completion, as a person at a narrow terminal has them


COMMANDS = [
    command.__name__.replace("_", "-") for commands in PANELS.values() for command in commands
]


def page_of(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="semix", env=environment)


def help_of(*arguments: str, columns: int) -> list[str]:
    result = page_of(*arguments, "--help", COLUMNS=str(columns))
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_every_command_has_a_panel_and_one_line_of_80_columns():
    page, _, options = "\n".join(help_of(columns=80)).partition("─ Options ")
    assert "--install-completion" in options
    assert re.findall(r"^╭─ (\w+) ", page, re.MULTILINE) == list(PANELS)
    assert re.findall(r"^│ +(\S+)", page, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_one_example_that_it_takes(name):
    lines = help_of(name, columns=60)
    (example,) = (line.strip() for line in lines if line.startswith("   semix "))
    program, command, *arguments = shlex.split(example)
    assert (program, command) == ("semix", name)
    get_command(app).commands[name].make_context(name, arguments)


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("columns", [60, 80])
def test_a_page_fits_and_names_values_for_what_they_are(name, columns):
    lines = help_of(*name.split(), columns=columns)
    assert max(map(len, lines)) <= columns
    page = "\n".join(lines)
    assert not re.search(r"<(str|int|float|bool|path|list)|--no-|…", page)
    assert not re.search(r"\[[^\]]*\n", page), "a bracket over two lines"
    main_panel, more_panel, _ = page.partition(f"─ {MORE_PANEL} ")
    options = re.findall(r"^│ --", main_panel.partition("─ Options ")[2], re.MULTILINE)
    assert 0 < len(options) <= (6 if more_panel else 8)  # with --json and --help


def test_a_shell_completes_commands_options_and_choices(monkeypatch):
    def completed(words: str) -> list[str]:
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        return page_of(_SEMIX_COMPLETE="complete_bash", **environment).stdout.split()

    assert completed("semix re") == ["resume", "relabel", "report"]
    assert completed("semix resume --ret") == ["--retry-failed"]
    assert completed("semix build x.yaml --device c") == ["cpu", "cuda"]
    # Which shell a test runs under is anybody's guess.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert (
        "complete -o default -F _semix_completion semix"
        in page_of("--show-completion", "bash").stdout
    )


# Export command


def run(*arguments: object):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("format", ["folder", "parquet", "huggingface"])
def test_export_writes_and_says_what(format, tmp_path):
    root = make_root(tmp_path / "root")
    target = tmp_path / "out"
    result = run(root.url, "--to", target, "--format", format, "--image-format", "png", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts.pop("missing")[:2] == ["license", "creators"]
    metadata = {"metadata": f"{target}.croissant.json"} if format == "parquet" else {}
    assert facts == metadata | {
        "written": str(target),
        "format": format,
        "images": 12,
        "index": "index/0.json",
    }
    assert target.is_dir()
    again = run(root.url, "--to", target, "--format", format)
    assert isinstance(again.exception, InputError)
    assert "is there already" in str(again.exception)


def test_bad_arguments_are_named(tmp_path):
    root = make_root(tmp_path / "root")
    for options, message in [
        (["--labels", "abcdef"], "abcdef"),
        (["--index", "index/9.json"], "index/9.json: is not in"),
    ]:
        result = run(root.url, "--to", tmp_path / "out", *options)
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)
    assert not (tmp_path / "out").exists()
