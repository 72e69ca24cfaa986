from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator, Field, Tag

from data.errors import InputError
from data.settings import Settings, load_settings


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
            r"inner\.alfas = as given: unknown setting; did you mean inner\.alphas",
        ),
        ({"maybe": {"xyz": 3}}, r"maybe\.xyz = as given: unknown setting; known here: alphas"),
        (
            {"inner": {"alphas": 1}},
            r"inner\.alphas = 1: input should be greater than or equal to 2",
        ),
        ({"rate": float("nan")}, r"rate = nan: "),
        ({"inner": 3}, r"^inner = 3: must hold `key: value` settings$"),
        (
            {"named": {"a": {"alfas": 3}}},
            r"^named\.a\.alfas = as given: .* mean named\.a\.alphas\?$",
        ),
    ],
)
def test_each_mistake_is_named(values, message):
    with pytest.raises(InputError, match=message):
        load_settings(Outer, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"one": {"radus": 2}},
            r"^one\.radus = as given: unknown setting; did you mean one\.radius\?$",
        ),
        ({"one": {"radius": -1}}, r"^one\.radius = -1: input should be greater than 0$"),
        (
            {"one": {"shape": "cube", "hight": 2}},
            r"^one\.hight = as given: .* did you mean one\.height\?$",
        ),
        (
            {"one": {"shape": "cube", "xyz": 2}},
            r"^one\.xyz = as given: unknown setting; known here: height, inner, shape; a newer",
        ),
        (
            {"one": {"shape": "box", "inner": {"alfas": 2}}},
            r"^one\.inner\.alfas = as given: unknown setting; did you mean one\.inner\.alphas\?$",
        ),
        ({"one": {"shape": "foo"}}, r"^one\.shape = foo: choose one of circle, box, cube$"),
        ({"one": 3}, r"^one = 3: must hold `key: value` settings$"),
        (
            {"many": [{}, {"hight": 2}]},
            r"^many\.1\.hight = as given: .* known here: radius, shape; a newer",
        ),
        (
            {"by_field": {"shape": "foo"}},
            r"^by_field\.shape = foo: choose one of circle, box, cube$",
        ),
        ({"by_field": {"shape": "box", "height": "x"}}, r"^by_field\.height = 'x': "),
        ({"either": {"radus": 2}}, r"^either\.radus = as given: "),
        ({"length": [1, 2, "x"]}, r"^length = \[1, 2, 'x'\]: input should be 'short'$"),
    ],
)
def test_a_mistake_among_kinds_of_settings_is_named_as_it_was_written(values, message):
    with pytest.raises(InputError, match=message):
        load_settings(Outer, values)


def test_a_misspelt_required_setting_is_named_by_its_misspelling():
    class Named(Settings):
        name: str

    with pytest.raises(InputError, match=r"^nme = as given: unknown setting; did you mean name\?$"):
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
    assert [line.partition(" = ")[0] for line in lines] == [
        "inner.alfa",
        "either.radus",
        "nme",
        "inner.alphas",
        "length",
        "rate",
    ]
    assert lines[0] == "inner.alfa = as given: unknown setting; did you mean inner.alphas?"
    assert lines[-1] == "rate = -1: input should be greater than 0"
    with pytest.raises(InputError) as caught:
        load_settings(Outer, {f"unknown{number}": 1 for number in range(30)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "and 10 more"
    assert "known here: by_field, either" in lines[0]
    assert lines[1] == "unknown1 = as given: unknown setting here, too"


def test_files_that_hold_no_settings(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        load_settings(Outer, tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(InputError, match="cannot be read as YAML: line 1, column 6"):
        load_settings(Outer, tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(InputError, match="must hold `key: value` lines"):
        load_settings(Outer, tmp_path / "list.yaml")
    with pytest.raises(InputError, match=r"--set = rate: write it as section\.key=value"):
        load_settings(Outer, {}, ["rate"])
    with pytest.raises(InputError, match="rate is a value and has no parts"):
        load_settings(Outer, {"rate": 1.0}, ["rate.x=1"])
