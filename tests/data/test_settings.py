"""Settings: overrides, all that can be wrong with one, the files that they are read from."""

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator, Field, Tag

from semix.data.errors import InputError
from semix.data.settings import Settings, load_settings, read_config_file, whole_path
from tests.s3 import s3_client


class Inner(Settings):
    alphas: int = Field(8, ge=2, description="images a series")


class Circle(Settings):
    shape: Literal["circle"] = "circle"
    radius: float = Field(1.0, gt=0)


class Box(Settings):
    shape: Literal["box", "cube"]
    height: float = 1.0
    inner: Inner = Inner()


def shape(value: Any) -> str:
    return value.get("shape", "circle") if isinstance(value, dict) else "circle"


Shape = Annotated[
    Annotated[Circle, Tag("circle")] | Annotated[Box, Tag("box")] | Annotated[Box, Tag("cube")],
    Discriminator(shape),
]
ByField = Annotated[Circle | Box, Field(discriminator="shape")]


class Outer(Settings):
    inner: Inner = Inner()
    one: Shape | None = None
    many: tuple[Shape, ...] = ()
    named: dict[str, Inner] = Field({})
    by_field: ByField = Circle()
    either: Inner | Circle | None = None
    length: Literal["short"] | tuple[int, ...] = "short"
    maybe: Inner | None = None
    rate: float = Field(1e-3, gt=0, description="step size")
    kind: Literal["projection", "simplex"] = "projection"


def test_a_key_that_yaml_takes_for_true_is_text(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("on: {no: on}")
    assert read_config_file(file) == {"on": {"no": True}}


def test_yaml_and_overrides(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("inner:\n  alphas: 5\nrate: 1e-2\n")
    loaded = load_settings(Outer, file, ["inner.alphas=9", "maybe.alphas=3"])
    assert (loaded.inner.alphas, loaded.rate, loaded.maybe) == (9, 0.01, Inner(alphas=3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"inner": {"alfas": 3}},
            r"inner\.alfas: unknown setting; did you mean inner\.alphas",
        ),
        ({"maybe": {"xyz": 3}}, r"maybe\.xyz: unknown setting; known here: alphas"),
        (
            {"inner": {"alphas": 1}},
            r"inner\.alphas = 1: input should be greater than or equal to 2",
        ),
        ({"rate": float("nan")}, r"rate = nan: "),
        ({"inner": 3}, r"^inner = 3: must hold `key: value` settings$"),
        (
            {"named": {"a": {"alfas": 3}}},
            r"^named\.a\.alfas: .* mean named\.a\.alphas\?$",
        ),
    ],
)
def test_each_mistake_is_named(values, message):
    with pytest.raises(InputError, match=message):
        load_settings(Outer, values)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "alphas=9",
            r"^alphas: .* did you mean inner\.alphas or maybe\.alphas or either\.alphas\?$",
        ),
        ("inner.rate=2", r"^inner\.rate: unknown setting; did you mean rate\?$"),
        ("height=2", r"^height: unknown setting; did you mean one\.height or by_field\.height\?$"),
    ],
)
def test_a_setting_that_another_section_has_is_named_with_its_section(override, message):
    with pytest.raises(InputError, match=message):
        load_settings(Outer, {}, [override])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "projektion"}, r"^kind = 'projektion': did you mean projection\? choose one of "),
        ({"kind": "xyz"}, r"^kind = 'xyz': choose one of projection, simplex$"),
        ({"kind": 3}, r"^kind = 3: input should be 'projection' or 'simplex'$"),
        ({"one": {"shape": "cubes"}}, r"^one\.shape = cubes: did you mean cube\? choose one of "),
    ],
)
def test_a_value_that_is_no_choice_is_answered_with_the_nearest(values, message):
    with pytest.raises(InputError, match=message):
        load_settings(Outer, values)


@pytest.mark.parametrize("text", ["inner:\n\talphas: 5\n", "inner:\n  alphas: 5\n\tbeta: 1\n"])
def test_a_tab_is_named_with_its_place(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    line = text[: text.index("\t")].count("\n") + 1
    message = f"config = {file}: cannot be read as YAML: line {line}, column 1: a tab, .* spaces$"
    with pytest.raises(InputError, match=message):
        load_settings(Outer, file)


def test_a_picture_given_as_a_config_is_named_as_no_text(tmp_path):
    file = tmp_path / "bird.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(
        InputError, match=r"is not text.* give the path or URL of a YAML file$"
    ) as caught:
        load_settings(Outer, file)
    assert (caught.value.field, caught.value.value) == ("config", str(file))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"one": {"radus": 2}},
            r"^one\.radus: unknown setting; did you mean one\.radius\?$",
        ),
        ({"one": {"radius": -1}}, r"^one\.radius = -1: input should be greater than 0$"),
        (
            {"one": {"shape": "cube", "hight": 2}},
            r"^one\.hight: .* did you mean one\.height\?$",
        ),
        (
            {"one": {"shape": "cube", "xyz": 2}},
            r"^one\.xyz: unknown setting; known here: height, inner, shape; a newer",
        ),
        (
            {"one": {"shape": "box", "inner": {"alfas": 2}}},
            r"^one\.inner\.alfas: unknown setting; did you mean one\.inner\.alphas\?$",
        ),
        ({"one": {"shape": "foo"}}, r"^one\.shape = foo: choose one of circle, box, cube$"),
        ({"one": 3}, r"^one = 3: must hold `key: value` settings$"),
        (
            {"many": [{}, {"hight": 2}]},
            r"^many\.1\.hight: .* known here: radius, shape; a newer",
        ),
        (
            {"by_field": {"shape": "foo"}},
            r"^by_field\.shape = foo: choose one of circle, box, cube$",
        ),
        ({"by_field": {"shape": "box", "height": "x"}}, r"^by_field\.height = 'x': "),
        ({"either": {"radus": 2}}, r"^either\.radus: "),
        ({"length": [1, 2, "x"]}, r"^length = \[1, 2, 'x'\]: input should be 'short'$"),
    ],
)
def test_a_mistake_among_kinds_of_settings_is_named_as_it_was_written(values, message):
    with pytest.raises(InputError, match=message):
        load_settings(Outer, values)


def test_a_misspelt_required_setting_is_named_by_its_misspelling():
    class Named(Settings):
        name: str

    with pytest.raises(InputError, match=r"^nme: unknown setting; did you mean name\?$"):
        load_settings(Named, {"nme": "x"})
    with pytest.raises(InputError, match=r"^name = nothing: this setting is required$"):
        load_settings(Named, {})


def test_all_mistakes_are_named_at_once():
    class Named(Outer):
        name: str

    values = {
        "nme": "x",
        "inner": {"alphas": 1, "alfa": 2},
        "either": {"radus": 2},
        "length": [1, "x", "y"],
        "rate": -1,
    }
    with pytest.raises(InputError) as caught:
        load_settings(Named, values)
    lines = str(caught.value).splitlines()
    assert [re.split(" = |: ", line)[0] for line in lines] == [
        "inner.alfa",
        "either.radus",
        "nme",
        "inner.alphas",
        "length",
        "rate",
    ]
    assert lines[0] == "inner.alfa: unknown setting; did you mean inner.alphas?"
    assert lines[-1] == "rate = -1: input should be greater than 0"
    with pytest.raises(InputError) as caught:
        load_settings(Outer, {f"unknown{number}": 1 for number in range(30)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "and 10 more"
    assert "known here: by_field, either" in lines[0]
    assert lines[1] == "unknown1: unknown setting here, too"


def test_a_path_and_a_url_of_it_read_the_same(tmp_path, monkeypatch):
    file = tmp_path / "a#b.yaml"
    file.write_text("real: {name: digits}")
    monkeypatch.chdir(tmp_path)
    assert whole_path("a#b.yaml") == str(file)
    assert whole_path(f"file://{tmp_path}/c.yaml") == f"file://{tmp_path}/c.yaml"
    assert read_config_file(file) == read_config_file("a#b.yaml") == {"real": {"name": "digits"}}
    file.rename(tmp_path / "c.yaml")
    assert read_config_file(f"file://{tmp_path}/c.yaml") == {"real": {"name": "digits"}}


def test_a_bucket_holds_settings(bucket, s3_server):
    s3_client(s3_server).put_object(
        Bucket=bucket.removeprefix("s3://"), Key="deep/er/build.yaml", Body=b"mixing: {seed: 7}"
    )
    assert read_config_file(f"{bucket}/deep/er/build.yaml") == {"mixing": {"seed": 7}}
    with pytest.raises(InputError, match=rf"^config = {bucket}/none.yaml: there is no such file"):
        read_config_file(f"{bucket}/none.yaml")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{folder}/none.yaml", "config = {folder}/none.yaml: there is no such file; give the path"),
        ("file://{folder}/none.yaml", "config = file://{folder}/none.yaml: there is no such file"),
        ("{folder}", "config = {folder}: is a folder; give the path or URL of a YAML file"),
        ("{folder}/bad.yaml/x", "config = {folder}/bad.yaml/x: cannot be read: Not a directory"),
        (
            "{folder}/bad.yaml",
            "config = {folder}/bad.yaml: cannot be read as YAML: line 1, column ",
        ),
        ("{folder}/bytes.yaml", "config = {folder}/bytes.yaml: is not text in UTF-8, but perhaps"),
        ("{folder}/list.yaml", "config = {folder}/list.yaml: must hold `key: value` lines"),
        ("https://host/a.yaml", "config = https://host/a.yaml: use one of file, s3, gs"),
        ("s3://b", "config = s3://b: write s3://BUCKET/FOLDER"),
        ("s3://key:secret@bucket/a.yaml", "config = s3://bucket/a.yaml: no user or password in"),
        ("s3://bucket/a.yaml?signature=1", "config = s3://bucket/a.yaml: no query, fragment"),
        ("memory://a/b.yaml", "config = memory://a/b.yaml: there is no such file"),
    ],
)
def test_what_is_wrong_is_named_without_secrets(tmp_path, source, message):
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(InputError, match="^" + re.escape(message.format(folder=tmp_path))):
        read_config_file(source.format(folder=tmp_path))


def test_an_override_that_is_none_is_refused():
    with pytest.raises(InputError, match=r"--set = rate: write it as section\.key=value"):
        load_settings(Outer, {}, ["rate"])
    with pytest.raises(InputError, match="rate is a value, not a section"):
        load_settings(Outer, {"rate": 1.0}, ["rate.x=1"])
