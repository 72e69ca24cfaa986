import pytest
from pydantic import Field

from data.errors import InputError
from data.settings import Settings, load_settings


class Inner(Settings):
    alphas: int = Field(8, ge=2, description="images a series")


class Outer(Settings):
    inner: Inner = Inner()
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
        ({"inner": {"alfas": 3}}, r"inner\.alfas = 3: unknown setting; did you mean inner\.alphas"),
        ({"maybe": {"xyz": 3}}, r"maybe\.xyz = 3: unknown setting; known here: alphas"),
        (
            {"inner": {"alphas": 1}},
            r"inner\.alphas = 1: input should be greater than or equal to 2",
        ),
        ({"rate": float("nan")}, r"rate = nan: "),
    ],
)
def test_each_mistake_is_named(values, message):
    with pytest.raises(InputError, match=message):
        load_settings(Outer, values)


def test_files_that_hold_no_settings(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        load_settings(Outer, tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(InputError, match="is not YAML"):
        load_settings(Outer, tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(InputError, match="must hold `key: value` lines"):
        load_settings(Outer, tmp_path / "list.yaml")
    with pytest.raises(InputError, match=r"--set = rate: write it as section\.key=value"):
        load_settings(Outer, {}, ["rate"])
    with pytest.raises(InputError, match="rate is a value and has no parts"):
        load_settings(Outer, {"rate": 1.0}, ["rate.x=1"])
