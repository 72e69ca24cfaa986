"""Settings files at paths and URLs, and all that can be wrong with one."""

import re

import pytest

from data.errors import InputError
from data.settings import read_config_file, whole_path
from tests.s3 import s3_client


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
        ("{folder}/bad.yaml", "config = {folder}/bad.yaml: cannot be read as YAML: "),
        ("{folder}/bytes.yaml", "config = {folder}/bytes.yaml: cannot be read as YAML: "),
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
