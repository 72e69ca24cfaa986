"""Attacks on a run and its server by other accounts, by foreign web pages and by names."""

import base64
import html
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from markdown_it import MarkdownIt
from prefect import flow, runtime
from prefect.settings import get_current_settings
from torch import nn

from semix.calib.results import load_methods
from semix.calib.tables import as_markdown, overview
from semix.data.errors import InputError
from semix.data.formats import Failure
from semix.flows.artifacts import build_summary, link_to, markdown_file, series_sheet
from semix.pipeline.generators.latent_diffusion import compile_network
from tests.calib.measured import make_run
from tests.handmade import make_root

REQUESTS = [  # of a browser that was lured: tokens, pages, what runs said, and changes
    ("GET", "/api/csrf-token?client=evil", None),
    ("GET", "/api/admin/version", None),
    ("GET", "/ui-settings", None),
    ("GET", "/", None),
    ("POST", "/api/flows/", {"name": "evil"}),
    ("POST", "/api/flow_runs/filter", {}),
    ("POST", "/api/logs/filter", {}),
    ("POST", "/api/variables/", {"name": "evil", "value": "1"}),
]
GUARDED = [request for request in REQUESTS if request[1].startswith("/api/")]
SOCKETS = ["/api/events/in", "/api/events/out", "/api/logs/out"]


@pytest.fixture
def address(prefect_api):
    return urlsplit(prefect_api).netloc


@pytest.fixture
def key(prefect_api):
    return get_current_settings().api.auth_string.get_secret_value()


def ask(address, method, path, body=None, *, host="", key="", **headers):
    """Status and body of one request, with exactly these headers."""
    if key:
        headers["Authorization"] = "Basic " + base64.b64encode(key.encode()).decode()
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        text = json.dumps(body) if body is not None else None
        headers = {"Host": host or address, "Content-Type": "application/json"} | headers
        connection.request(method, path, text, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.fixture
def token(address, key):
    """Headers that prove that a change is not forged, got with the key."""
    status, body = ask(address, "GET", "/api/csrf-token?client=ours", key=key)
    assert status == 200
    return {"Prefect-Csrf-Client": "ours", "Prefect-Csrf-Token": json.loads(body)["token"]}


def opening(address, path, *, host, protocol="prefect"):
    """The status that the opening of a web socket is answered with; 101 opens it."""
    name, port = address.split(":")
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n"
    request += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    request += f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}\r\n"
    request += f"Sec-WebSocket-Protocol: {protocol}\r\n\r\n" if protocol else "\r\n"
    with socket.create_connection((name, int(port)), timeout=30) as connection:
        connection.sendall(request.encode())
        return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil@127.0.0.1"])
@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_a_rebound_name_gets_no_answer_even_with_the_key(
    address, key, token, host, method, path, body
):
    """A page of evil.example lets its name point to 127.0.0.1: the browser takes both for one."""
    name = f"{host}:{address.split(':')[1]}"
    headers = {"Origin": f"http://{name}"} | token
    assert ask(address, method, path, body, host=name, key=key, **headers)[0] == 400


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("protocol", ["prefect", ""])
def test_a_rebound_name_opens_no_web_socket(address, path, protocol):
    """A page of evil.example opens the sockets that events and logs come by."""
    status = opening(address, path, host=f"evil.example:{address.split(':')[1]}", protocol=protocol)
    assert status == 400


@pytest.mark.parametrize(("method", "path", "body"), GUARDED)
def test_without_the_key_nothing_is_read_or_changed(address, token, method, path, body):
    """Another account of this machine finds the port and asks; even with a token that is stolen."""
    for key in ("", "semix:guessed-by-someone"):
        assert ask(address, method, path, body, key=key, **token)[0] == 401


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("token", [None, "semix:guessed-by-someone"])
def test_without_the_key_a_web_socket_says_nothing(address, path, token):
    """Another account opens a socket and claims to be a client, with no key or another one."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    with connect(f"ws://{address}{path}", subprotocols=["prefect"]) as opened:
        opened.send(json.dumps({"type": "auth", "token": token}))
        with pytest.raises(ConnectionClosed):
            opened.recv(timeout=30)
    assert opening(address, path, host=address, protocol="") in (403, 400)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_with_the_key_and_the_right_name_all_is_answered(address, key, token, host):
    """No attacker: the run's own client, and its user's browser."""
    name = f"{host}:{address.split(':')[1]}"
    for path in ("/", "/ui-settings", "/api/ready"):
        assert ask(address, "GET", path, host=name)[0] == 200
    for path in ("/api/flow_runs/filter", "/api/logs/filter"):
        assert ask(address, "POST", path, {}, host=name, key=key, **token)[0] == 200
    assert opening(address, "/api/events/out", host=name) == 101


def test_the_key_is_in_no_command_line_log_or_readable_file(key):
    """Another account lists processes and reads what is not closed to it."""
    password = key.partition(":")[2]
    assert len(password) >= 32
    for process in psutil.process_iter():
        try:
            assert password not in " ".join(process.cmdline())
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    home = Path(get_current_settings().home)
    key_files = [file for file in home.glob("semix-server*") if password in file.read_text()]
    assert [file.stat().st_mode & 0o777 for file in key_files] == [0o600]
    assert "semix-server.log" not in {file.name for file in key_files}


def test_each_run_has_another_key_told_by_the_name_of_its_users_file(key):
    """Another account reads a run's kept output, or tries the key of one run on the next."""
    code = (
        "import logging\nfrom pathlib import Path\n"
        "logging.basicConfig(level='INFO')\n"
        "from semix.flows.run_server import prefect_server\n"
        "from prefect.settings import get_current_settings\n"
        "with prefect_server() as url:\n"
        " settings = get_current_settings()\n"
        " port = url.split(':')[2].removesuffix('/api')\n"
        " file = Path(settings.home) / f'semix-server-{port}.key'\n"
        " print(file, file.read_text(), settings.api.auth_string.get_secret_value())\n"
        "print(file.exists())"
    )
    environment = {**os.environ, "PREFECT_API_URL": ""}
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert completed.returncode == 0, completed.stderr
    file, key_in_file, key_sent, file_remains = completed.stdout.split()
    assert key_in_file == key_sent != key and file_remains == "False"
    lines = [line for line in completed.stderr.splitlines() if "its login is in" in line]
    assert len(lines) == 1 and file in lines[0]
    assert key_sent.partition(":")[2] not in completed.stderr


HOSTILE = (
    "<img src=x onerror=alert(1)> | `</code>\n\n# Title\n\n<script>alert(2)</script> "
    "&lt;b&gt; [here](javascript:alert(3)) ![](https://evil.example/seen.png)"
)


def rendered(text):
    """The tags and the visible text of Markdown as Prefect's pages render it, raw HTML included."""
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    return set(re.findall(r"<([a-z0-9]+)", page)), html.unescape(re.sub(r"<[^>]*>", "", page))


def test_a_methods_name_is_text_in_a_table_of_results(tmp_path):
    """Whoever shares a run's folder names its method so that pages which show it run a script."""
    run = make_run(tmp_path / "run", HOSTILE, [{}])
    tags, text = rendered(as_markdown(overview(load_methods([run]))))
    assert tags == {"table", "thead", "tbody", "tr", "th", "td"}
    assert " ".join(HOSTILE.split()) in text


def test_names_and_reasons_of_a_foreign_root_are_text_on_prefects_pages(artifacts_of, tmp_path):
    """Whoever shares a root or names a folder has his words shown with what a build measured."""
    folder = tmp_path / "<img src=x onerror=alert(1)>` <b>"
    root = make_root(folder / "<i>_mixed_", shards=2)
    root.discard(1)
    root.record_failure(Failure(shard=1, attempt=1, error="<b>", message=HOSTILE, time=0.0))
    (folder / "study.md").write_text("# Study\n")

    @flow
    def showing() -> str:
        build_summary(root, key="hostile", began=root.progress(), before=[], seconds=2.0)
        series_sheet(root, key="hostile")
        markdown_file(folder / "study.md", key="hostile")
        link_to(folder / "study.md", key="hostile")
        return str(runtime.flow_run.id)

    artifacts = artifacts_of(showing())
    summary = artifacts["hostile-summary"]
    rows = {row["what"]: row["value"] for row in json.loads(summary["data"])}
    assert rendered(rows["shard 1 failed"])[1].strip() == " ".join(f"<b>: {HOSTILE}".split())
    texts = [
        *rows.values(),
        artifacts["hostile-results"]["data"],
        artifacts["hostile-series"]["data"],
    ]
    texts += [artifact["description"] for artifact in artifacts.values()]
    for text in texts:
        assert rendered(text)[0] <= {"p", "h1"} | ({"img"} if "base64," in text else set()), text


COMPILED = """
import os, sys, torch
from torch import nn
from semix.calib.training_step import TrainingForward

class Network(nn.Module):
    def forward(self, images):
        return images * 2, images.sin() + 1

logits, _ = TrainingForward(Network(), compiled=True)(torch.ones(3))
assert logits.tolist() == [2, 2, 2]
"""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_what_a_training_compiles_comes_from_no_shared_folder(tmp_path):
    """Another account made /tmp/torchinductor_USER first, and fills it with programs of its own."""
    shared, cache = tmp_path / "tmp", tmp_path / "cache"
    shared.mkdir()
    environment = {**os.environ, "TMPDIR": str(shared), "SEMIX_CACHE": str(cache)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", COMPILED], env=environment, check=True)
    assert [file for file in shared.rglob("*") if file.suffix in (".so", ".cpp", ".py")] == []
    (folder,) = cache.glob("inductor-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("*.so"))


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """A cache folder, and no word of where torch keeps what it compiled."""
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    return tmp_path


def test_what_a_denoiser_compiles_comes_from_no_shared_folder(caches):
    """The same attack on a build; a folder that the user chose stays."""
    compile_network(nn.Linear(1, 1), "none")
    assert not os.environ["TORCHINDUCTOR_CACHE_DIR"]
    compile_network(nn.Linear(1, 1), "full")
    (folder,) = caches.glob("inductor-*")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/elsewhere"
    compile_network(nn.Linear(1, 1), "full")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_a_folder_for_compiled_programs_that_others_can_write_is_refused(caches):
    """Another account made the folder in a cache that several share."""
    compile_network(nn.Linear(1, 1), "full")
    (folder,) = caches.glob("inductor-*")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = ""
    folder.chmod(0o777)
    with pytest.raises(InputError, match=r"TORCHINDUCTOR_CACHE_DIR = .*: other users"):
        compile_network(nn.Linear(1, 1), "full")


def test_a_cache_that_cannot_be_written_is_named(caches, monkeypatch):
    """No attacker: a home that is a file, or read-only."""
    (caches / "file").touch()
    monkeypatch.setenv("SEMIX_CACHE", str(caches / "file"))
    with pytest.raises(InputError, match=r"TORCHINDUCTOR_CACHE_DIR = .*: cannot be made \(Not a"):
        compile_network(nn.Linear(1, 1), "full")
