import subprocess
import sys
from pathlib import Path

import pytest

from data.errors import InputError
from data.store import Store


def test_accepted_urls():
    assert Store("some/root").url == str(Path("some/root").absolute())
    assert Store("file:///some/root").url == "/some/root"
    assert Store("s3://bucket/some/root/").url == "s3://bucket/some/root"
    assert Store("gs://bucket").url == "gs://bucket"
    assert Store("memory://x").url == "memory://x"
    assert Store("some/root").local and not Store("s3://bucket").local
    assert Store("s3://bucket").shared and not Store("memory://x").shared


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("http://host/x", "use one of file, s3, gs, memory"),
        ("https://host/x", "use one of file, s3, gs, memory"),
        ("pipe://cat", "use one of file, s3, gs, memory"),
        ("hf://datasets/x", "use one of file, s3, gs, memory"),
        ("github://owner:repo@/x", "use one of file, s3, gs, memory"),
        ("simplecache::file:///x", "chained URLs are not used"),
        ("s3://bucket/x::file:///y", "chained URLs are not used"),
        ("s3://", "write s3://BUCKET/FOLDER"),
        ("s3://a/x", "write s3://BUCKET/FOLDER"),
        ("gs:///x", "write gs://BUCKET/FOLDER"),
        ("s3://bucket/../other", r"no empty parts, \. or \.\. in a URL"),
        ("s3://bucket//x", r"no empty parts, \. or \.\. in a URL"),
        ("memory://x/../y", r"no empty parts, \. or \.\. in a URL"),
        ("s3://bucket/x?versionId=1", "no query, fragment"),
        ("s3://bucket/x#1", "no query, fragment"),
        ("s3://bucket/*", "no query, fragment"),
        ("file://some/root", "write file:///absolute/path"),
        ("s3://bucket/x\n", "has control characters"),
        ("some\x00root", "has control characters"),
        ("", "give a local path or a URL"),
    ],
)
def test_other_urls_are_refused(url, remedy):
    with pytest.raises(InputError, match=remedy):
        Store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hunter2@bucket/x",
        "s3://user:hun/ter2@bucket/x",
        "s3://user:hun@ter2@bucket/x",
        "https://user:hunter2@host/x",
        "s3://bucket/x?secret=hunter2",
        "simplecache::s3://user:hunter2@bucket",
        "s3://user:hunter2@bucket/\x00",
    ],
)
def test_a_refusal_does_not_repeat_a_secret(url):
    with pytest.raises(InputError) as refused:
        Store(url)
    assert "hunter2" not in f"{refused.value} {refused.value.value} {refused.value.args}"
    assert "ter2" not in str(refused.value)


def test_a_path_that_looks_like_a_command_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("pipe:touch executed")
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["pipe:touch executed"]


@pytest.mark.process
@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named(protocol, package):
    script = (
        f"import sys\nsys.modules['{package}'] = None\n"
        f"from data.store import Store\nStore('{protocol}://bucket/x')\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    remedy = f"url = {protocol}://bucket/x: needs {package}: pip install 'semix[{protocol}]'"
    assert remedy in found.stderr


@pytest.mark.process
def test_a_local_store_needs_no_cloud_package():
    script = (
        "import sys\nfrom data.store import Store\nStore('/tmp').exists('x')\n"
        "print([m for m in ('torch', 'fsspec', 's3fs', 'gcsfs', 'botocore') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
