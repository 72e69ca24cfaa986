"""The hostile list: malicious content of files that semix is given, and that it rejects by name.

Payloads have plain ids and come in five kinds: runs, plans, label sets, pictures, links; names are
in test_hostile_names.py. Every command ends by itself, with an error that names the file and does
not call it a fault of semix, and a neighbouring folder stays as it was.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from semix.data.errors import InputError
from semix.data.imagefolder import inspect_folder
from semix.data.real import RealDataConfig, RealDataset, load_real
from semix.data.root import Root
from semix.flows.paths import training_folder
from semix.pipeline.standins import standins_digest, tiny_recipe, train_standins
from tests.calib.measured import STUDY, make_run
from tests.command import semix
from tests.data.test_images import PICTURE, chunk, encode, png
from tests.data.whole_roots import whole_root
from tests.handmade import LABELS_DIGEST, label_set, labels_of, make_root

pytestmark = pytest.mark.timeout(60)  # a command that waits for a payload fails

DEEP = b"[" * 200_000


@pytest.fixture(autouse=True)
def photos(tmp_path: Path):
    """A user's folder beside the attacked one; it must stay as it was."""
    folder = tmp_path / "photos"
    (folder / "2019").mkdir(parents=True)
    (folder / "000001").mkdir()
    for name in ("a.jpg", "2019/b.jpg", "000001/c.jpg", "authorized_keys"):
        (folder / name).write_text("precious")
    before = {path: path.is_dir() or path.read_text() for path in folder.rglob("*")}
    yield folder
    assert {path: path.is_dir() or path.read_text() for path in folder.rglob("*")} == before


def rejection(*arguments: object) -> str:
    """Run a command that must end with an error about the input; returns its output."""
    status, out, err = semix(*map(str, arguments))
    assert status in (1, 2), f"it ended with {status}: {out}{err}"
    assert "not your input" not in err and "Traceback" not in err, err
    return f"{out}{err}"


# Runs: the files that `semix report` reads of a run that somebody sent


def change(run: Path, file: str, **values: object) -> None:
    path = run / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_row(run: Path, **values: object) -> None:
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    change(run, "evaluation.json", rows=[rows[0] | values])


RUNS: dict[str, Callable[[Path], object]] = {
    "evaluation is a number": lambda run: (run / "evaluation.json").write_text("7"),
    "evaluation is a list": lambda run: (run / "evaluation.json").write_text("[]"),
    "evaluation is empty": lambda run: (run / "evaluation.json").write_text(""),
    "evaluation nested without end": lambda run: (run / "evaluation.json").write_bytes(DEEP),
    "evaluation in UTF-16": lambda run: (run / "evaluation.json").write_text("{}", "utf-16"),
    "evaluation is a folder": lambda run: (
        (run / "evaluation.json").unlink(),
        (run / "evaluation.json").mkdir(),
    ),
    "evaluation is a pipe": lambda run: (
        (run / "evaluation.json").unlink(),
        os.mkfifo(run / "evaluation.json"),
    ),
    "rows are a text": lambda run: change(run, "evaluation.json", rows="all"),
    "a row is a number": lambda run: change(run, "evaluation.json", rows=[3]),
    "a row of no known stage": lambda run: change_row(run, stage="../base"),
    "a seed that is a list": lambda run: change_row(run, seed=[0]),
    "bins that are a text": lambda run: change_row(run, bins="many"),
    "a temperature that is a text": lambda run: change_row(run, temperature="hot"),
    "measures that are a list": lambda run: change_row(run, kinds={"plain": [0.5]}),
    "a measure that is a text": lambda run: change_row(run, kinds={"plain": {"accuracy": "all"}}),
    "measures that lack accuracy": lambda run: change_row(
        run, kinds={"plain": {"ece": 0.1}, "scaled": {"ece": 0.1}}
    ),
    "kinds that lack one": lambda run: change_row(run, kinds={"plain": {"accuracy": 0.5}}),
    "logits outside the run": lambda run: change_row(run, logits="../photos/a.jpg"),
    "logits at an absolute place": lambda run: change_row(run, logits="/etc/passwd"),
    "logits that are a pipe": lambda run: (
        (run / "seed-0" / "logits-base.safetensors").unlink(),
        os.mkfifo(run / "seed-0" / "logits-base.safetensors"),
    ),
    "a name that is a list": lambda run: change(run, "evaluation.json", name=["CE"]),
    "a head of no known method": lambda run: change(run, "config.json", head={"method": "rm"}),
    "config is a list": lambda run: (run / "config.json").write_text("[]"),
    "config is a pipe": lambda run: (
        (run / "config.json").unlink(),
        os.mkfifo(run / "config.json"),
    ),
    "data is a text": lambda run: (run / "data.json").write_text('"digits"'),
    "data is not there": lambda run: (run / "data.json").unlink(),
}


@pytest.mark.parametrize("payload", RUNS.values(), ids=RUNS)
def test_a_run_that_somebody_sent_is_refused_by_name(payload, tmp_path):
    run = make_run(tmp_path / "run", "CE", [{"accuracy": 0.9}])
    payload(run)
    assert str(run) in rejection("report", run, "--out", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


# Plans


PLANS: dict[str, object] = {
    "groups that are negative": {"num_groups": -3},
    "groups beyond all numbers": {"num_groups": 10**30, "num_shards": 10**30},
    "shards that are a fraction": {"num_shards": 1.5},
    "shards that are true": {"num_shards": True},
    "no image in a series": {"images_per_group": 0},
    "class names that are numbers": {"class_names": [1, 2, 3]},
    "class names that are one text": {"class_names": "cat"},
    "no class names": {"class_names": []},
    "a digest of another form": {"digest": "../../etc"},
    "a config that is a list": {"config": []},
    "versions that are a number": {"versions": 3},
    "a schema that is a text": {"schema": "1"},
    "a schema of the future": {"schema": 10**6},
}
PLAN_FILES: dict[str, bytes] = {
    "a plan that is empty": b"",
    "a plan that is a list": b"[]",
    "a plan in UTF-16": '{"schema": 1}'.encode("utf-16"),
    "a plan with two values of one key": b'{"schema": 1, "schema": 2}',
    "a plan with NaN": b'{"schema": NaN}',
    "a plan nested without end": DEEP,
    "a plan with a number of a million digits": b'{"schema": ' + b"9" * 1_000_000 + b"}",
    "a plan with a lone surrogate": rb'{"schema": 1, "digest": "\ud800"}',
    "a plan with bytes behind it": b'{"schema": 1} {"schema": 1}',
}


@pytest.mark.parametrize("payload", PLANS.values(), ids=PLANS)
def test_a_plan_with_a_hostile_value_is_refused_by_name(payload, tmp_path):
    root = make_root(tmp_path / "root", shards=1, groups=1)
    change(Path(root.url), "plan.json", **payload)
    for command in (["status"], ["export", "--to", tmp_path / "out"]):
        assert f"{root.url}/plan.json" in rejection(command[0], root.url, *command[1:])


@pytest.mark.parametrize("payload", PLAN_FILES.values(), ids=PLAN_FILES)
def test_a_plan_that_is_none_is_refused_by_name(payload, tmp_path):
    root = make_root(tmp_path / "root", shards=1, groups=1)
    Path(root.url, "plan.json").write_bytes(payload)
    assert f"{root.url}/plan.json" in rejection("status", root.url)


def test_a_plan_that_is_a_pipe_is_not_waited_for(tmp_path):
    root = make_root(tmp_path / "root", shards=1, groups=1)
    Path(root.url, "plan.json").unlink()
    os.mkfifo(Path(root.url, "plan.json"))
    assert "no regular file" in rejection("status", root.url)


# Label sets


def put_labels(root: Root, **changes: object) -> None:
    """Commit the labels of the only shard, then change these fields of their file."""
    labels = label_set(root)
    labels.commit(0, images=root.record(0).sha256, groups=[labels_of(0)])
    change(Path(root.url), labels.name(0), **changes)


def put_set(root: Root, **changes: object) -> None:
    put_labels(root)
    change(Path(root.url), f"labels/{LABELS_DIGEST}/set.json", **changes)


def one_series(**changes: object) -> dict[str, object]:
    series = {"group": 0, "weights": [0.0, 1.0], "labels": [[[0, 0.0], [1, 1.0]]] * 2}
    return {"groups": [series | changes]}


def swap(root: Root, make: Callable[[Path], object]) -> None:
    """Replace the file of the shard's labels by what `make` makes."""
    put_labels(root)
    path = Path(root.url, f"labels/{LABELS_DIGEST}/0000/0000000.json")
    path.unlink()
    make(path)


LABELS: dict[str, Callable[[Root], object]] = {
    "shares that are negative": lambda r: put_labels(
        r, **one_series(labels=[[[0, -1.0], [1, 2.0]]] * 2)
    ),
    "shares of more than one": lambda r: put_labels(r, **one_series(labels=[[[0, 7.0]]] * 2)),
    "a class far behind the last": lambda r: put_labels(
        r, **one_series(labels=[[[10**9, 1.0]]] * 2)
    ),
    "a class before the first": lambda r: put_labels(r, **one_series(labels=[[[-1, 1.0]]] * 2)),
    "a class twice": lambda r: put_labels(r, **one_series(labels=[[[0, 0.5], [0, 0.5]]] * 2)),
    "a label without a class": lambda r: put_labels(r, **one_series(labels=[[], []])),
    "weights that are infinite": lambda r: put_labels(r, **one_series(weights=[0.0, 1e999])),
    "more weights than images": lambda r: put_labels(r, **one_series(weights=[0.5] * 9)),
    "another series than the shard's": lambda r: put_labels(r, **one_series(group=10**12)),
    "series that are a text": lambda r: put_labels(r, groups="all"),
    "images of another digest": lambda r: put_labels(r, images="0" * 64),
    "labels of another shard": lambda r: put_labels(r, shard=1),
    "labels nested without end": lambda r: swap(r, lambda path: path.write_bytes(DEEP)),
    "labels that are a folder": lambda r: swap(r, lambda path: path.mkdir()),
    "labels that are a pipe": lambda r: swap(r, os.mkfifo),
    "labels behind a link to a device": lambda r: swap(r, lambda p: p.symlink_to("/dev/zero")),
    "a set of another root": lambda r: put_set(r, plan="e" * 64),
    "a set of another digest": lambda r: put_set(r, digest="e" * 64),
    "a set whose annotation is a list": lambda r: put_set(r, annotation=[]),
    "a set of the future": lambda r: put_set(r, schema=10**6),
}


@pytest.mark.parametrize("payload", LABELS.values(), ids=LABELS)
def test_a_label_set_that_somebody_sent_is_refused_by_name(payload, tmp_path):
    root = make_root(tmp_path / "root", shards=1, groups=1)
    payload(root)
    options = ["--to", tmp_path / "out", "--labels", LABELS_DIGEST[:12]]
    assert LABELS_DIGEST[:12] in rejection("export", root.url, *options)
    assert not (tmp_path / "out").exists()


# Pictures


def text_bomb(kind: bytes) -> bytes:
    """A PNG with a text of half a gigabyte in half a megabyte, or a profile of that size."""
    packed = zlib.compress(bytes(1 << 29), 1)
    return png(8, 8, chunk(kind, b"x\0\0" + packed), *PIXELS)


PIXELS = [chunk(b"IDAT", zlib.compress(bytes(8 * (1 + 3 * 8))))]
PNG = encode(PICTURE, format="PNG")
JPEG = encode(PICTURE, format="JPEG")
CONTENTS: dict[str, bytes] = {
    "an empty file": b"",
    "a million spaces": b" " * 1_000_000,
    "an SVG that includes a file": b'<svg><image href="file:///etc/passwd"/></svg>',
    "a page that loads a script": b"<html><script src=//evil.example></script></html>",
    "PostScript that runs a program": b"%!PS-Adobe-3.0 EPSF-3.0\n(%pipe%touch x) (w) file",
    "a PDF": b"%PDF-1.7\n",
    "a ZIP": b"PK\x03\x04" + bytes(100),
    "a pickle": b"\x80\x04\x95cos\nsystem\n",
    "a program": b"\x7fELF" + bytes(100),
    "a PNG of no width": png(0, 8, *PIXELS),
    "a PNG of a negative height": png(8, 2**32 - 1, *PIXELS),
    "a PNG without pixels": PNG[:33] + chunk(b"IEND", b""),
    "a PNG with three bits a channel": PNG[:24] + b"\x03" + PNG[25:],
    "a PNG with its header twice": PNG[:33] + PNG[8:33] + PNG[33:60],
    "a PNG whose pixels are random": png(8, 8, chunk(b"IDAT", b"\x78\x9c" + bytes(range(200)))),
    "a PNG with a text of half a gigabyte": text_bomb(b"zTXt"),
    "a JPEG of no height": JPEG[:163] + b"\xff\xc0\x00\x11\x08\0\0\0\x08" + JPEG[172:200],
    "a JPEG that is its start alone": JPEG[:3],
    "a WebP longer than its file": b"RIFF" + struct.pack("<I", 2**32 - 1) + b"WEBPVP8 ",
    "a WebP of no kind": b"RIFF" + struct.pack("<I", 30) + b"WEBPXXXX" + bytes(18),
}
NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a link to a device that says nothing": lambda path: path.symlink_to("/dev/tty"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a pipe": lambda path: (os.mkfifo(f"{path}.x"), path.symlink_to(f"{path.name}.x")),
    "a folder by the name of a picture": lambda path: path.mkdir(),
}


@pytest.fixture
def pictures(tmp_path):
    """The path of a picture to be added to a folder of two classes."""
    for name in "xy":
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            PICTURE.save(tmp_path / "pictures" / name / f"{number}.png")
    return tmp_path / "pictures" / "x" / "z.png"


def settings_of(picture: Path, **changes: object) -> RealDataConfig:
    settings = {"name": "imagefolder", "path": str(picture.parents[1]), "image_size": 16}
    return RealDataConfig(**settings | {"train_per_class": 2, "validation_per_class": 1} | changes)


@pytest.mark.parametrize(
    "make",
    [*(lambda p, c=c: p.write_bytes(c) for c in CONTENTS.values()), *NO_FILES.values()],
    ids=[*CONTENTS, *NO_FILES],
)
def test_a_picture_that_is_none_is_refused_by_name(make, pictures):
    make(pictures)
    for read in (inspect_folder, lambda config: all_images(load_real(config))):
        with pytest.raises(InputError, match=r"x/z\.png"):
            read(settings_of(pictures))


def all_images(real: RealDataset) -> None:
    for split in (real.train, real.validation, real.test):
        split.images()


@pytest.mark.parametrize("name", ["a pipe", "a link to a device that never ends"])
def test_what_is_no_file_is_left_out_where_bad_pictures_are(name, pictures):
    NO_FILES[name](pictures)
    config = settings_of(pictures, skip_bad=1)
    assert "no regular file" in inspect_folder(config).bad[pictures]
    all_images(load_real(config))


@pytest.mark.parametrize("command", ["standins", "doctor"])
def test_a_pipe_among_pictures_is_waited_for_by_no_command(command, pictures, tmp_path):
    os.mkfifo(pictures)
    config = tmp_path / "build.yaml"
    real = settings_of(pictures).model_dump(mode="json", exclude_defaults=True)
    models = {"generator": {"model": "x"}, "annotation": {"model": "x"}}
    config.write_text(json.dumps({"real": real, "mixing": {"groups_per_pair": 1}, **models}))
    options = ["--out", tmp_path / "models"] if command == "standins" else []
    assert "x/z.png is no regular file" in rejection(command, config, *options)


TARS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a link to a folder": lambda path: path.symlink_to(path.parent),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", TARS.values(), ids=TARS)
@pytest.mark.parametrize("file", ["tar", "features", "prototypes"])
def test_what_is_no_file_in_a_root_is_waited_for_by_no_command(make, file, tmp_path):
    root = whole_root(tmp_path / "root", shards=1)
    record = root.record(0)
    names = {"tar": record.tar, "features": record.features.name}
    name = names.get(file, "prototypes.safetensors")
    Path(root.url, name).unlink()
    make(Path(root.url, name))
    for command in (["verify"], ["audit", "--out", tmp_path / "audit"]):
        assert name in rejection(command[0], root.url, *command[1:])
    if file == "tar":
        assert name in rejection("export", root.url, "--to", tmp_path / "out")


# Links: they would make a command write or remove outside a run, a study or a quickstart


FOLDERS = {  # by command: a path that a stranger replaced by a link, and the link's target
    "train": {
        "seed-0": "photos",
        "seed-0/checkpoint": "photos",
        "seed-0/checkpoint/000001": "photos",
        "seed-0/checkpoint/.000002.partial": "photos",
        "seed-0/tensorboard": "photos",
        "seed-0/wandb": "photos",
        "seed-0/history.jsonl": "photos/authorized_keys",
        "seed-0/.lock": "photos/new",
        "seed-0/model.safetensors": "photos/a.jpg",
        "config.json": "photos/authorized_keys",
        "evaluation.json": "photos/authorized_keys",
        "failure.json": "photos/authorized_keys",
    },
    "study": {
        "digits": "photos",
        "digits/ce": "photos",
        "digits/ce/seed-1/checkpoint": "photos",
        "figures": "photos",
        "mixed": "photos",
        "study.md": "photos/authorized_keys",
        "settings.json": "photos/new",
    },
    "quickstart": {
        "standins": "photos",
        "mixed": "photos",
        "runs": "photos",
        "runs/ce": "photos",
        "quickstart.log": "photos/authorized_keys",
        "series.png": "photos/new",
    },
    "evaluate": {
        "calarena": "photos",
        "seed-0": "photos",
        "seed-0/logits-head.safetensors": "photos/new",
    },
}
LINKS = {
    f"{command}: {name}": (command, name, target)
    for command, targets in FOLDERS.items()
    for name, target in targets.items()
}


def run_in(folder: Path, command: str, tmp_path: Path) -> str:
    """The error of a command that works in `folder`."""
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(STUDY if command == "study" else STUDY["base"] | {"name": "x"}))
    if command == "evaluate":
        return rejection(command, folder, "--export", "calarena")
    configs = [] if command == "quickstart" else [config]
    return rejection(command, *configs, "--out", folder)


@pytest.mark.parametrize(("command", "name", "target"), LINKS.values(), ids=LINKS)
def test_no_link_inside_is_followed(command, name, target, tmp_path):
    path = tmp_path / "place" / name
    if command == "evaluate":
        make_run(tmp_path / "place", "CE", [{}])
        if name == "seed-0":
            path.rename(tmp_path / "moved")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / target)
    assert f"{path}: is a link, and links are not followed" in run_in(
        tmp_path / "place", command, tmp_path
    )


@pytest.mark.parametrize("name", ["seed-0/history.jsonl", "seed-0/.lock", "config.json"])
@pytest.mark.parametrize("command", ["train", "study", "quickstart"])
def test_no_pipe_inside_is_waited_for(command, name, tmp_path):
    path = tmp_path / "place" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    assert f"{path}: is neither a file nor" in run_in(tmp_path / "place", command, tmp_path)


def test_the_folder_itself_may_be_a_link(tmp_path, photos):
    """No attack: people keep runs on another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to("disk")
    assert training_folder(tmp_path / "data" / "run") == tmp_path / "data" / "run"
    assert training_folder(tmp_path / "data") == tmp_path / "data"


def test_small_models_are_kept_behind_no_link(tmp_path, photos, digits):
    recipe = tiny_recipe(image_size=32)
    name = f"{standins_digest(digits, recipe)[:12]}.begun"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / name).symlink_to(photos)
    with pytest.raises(InputError, match=rf"/{name}: is a link, and links are not followed"):
        train_standins(digits, tmp_path / "models", recipe=recipe)
