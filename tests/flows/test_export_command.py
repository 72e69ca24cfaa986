import json

import pytest
from typer.testing import CliRunner

from data.errors import InputError
from flows.cli import app
from tests.handmade import make_root


def run(*arguments: object):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("format", ["folder", "parquet", "huggingface"])
def test_export_writes_and_says_what(format, tmp_path):
    root = make_root(tmp_path / "root")
    target = tmp_path / "out"
    done = run(root.url, "--to", target, "--format", format, "--image-format", "png", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "written": str(target),
        "format": format,
        "images": 12,
        "index": "index/0.json",
    }
    assert target.is_file() == (format == "parquet")
    again = run(root.url, "--to", target, "--format", format)
    assert isinstance(again.exception, InputError)
    assert "is there already" in str(again.exception)


def test_bad_arguments_are_named(tmp_path):
    root = make_root(tmp_path / "root")
    for options, message in [
        (["--labels", "abcdef"], "abcdef"),
        (["--index", "index/9.json"], "index/9.json: is not in"),
    ]:
        done = run(root.url, "--to", tmp_path / "out", *options)
        assert isinstance(done.exception, InputError)
        assert message in str(done.exception)
    assert not (tmp_path / "out").exists()
