import http.server
import json
import logging
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import httpx
import pytest

from semix.data.errors import InputError
from semix.data.root import Root
from semix.data.verify import damage
from semix.flows import child
from semix.flows.build import resume
from semix.flows.cli import explain
from semix.flows.failures import RunFailed, ServerLost
from semix.flows.run_server import SETTINGS
from semix.flows.server_probe import probe, require_server
from tests.family import below

pytestmark = pytest.mark.process

KEY = "semix:a-key-of-the-tests"
AT_ONCE = {"client.max_retries": 0}  # the first failed request counts as a lost server


class PrefectServer:
    """A real one with a key and CSRF protection, to be killed and started again."""

    def __init__(self, home: Path) -> None:
        self.home, self.process = home, None
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.start()

    def start(self) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            listener.listen()
            self.process = child.start(
                child.python_module("semix.flows.run_server", str(listener.fileno())),
                environment=SETTINGS
                | {
                    "PREFECT_API_URL": "",
                    "PREFECT_HOME": str(self.home),
                    "PREFECT_SERVER_API_AUTH_STRING": KEY,
                    "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
                },
                pass_fds=(listener.fileno(),),
            )
        urlopen(f"{self.url}/health", timeout=120)  # the socket takes requests before it serves

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wipe(self) -> None:
        for file in self.home.glob("prefect.db*"):
            file.unlink()

    def state(self, run: str) -> str:
        with sqlite3.connect(self.home / "prefect.db") as database:
            rows = database.execute("select state_type from flow_run where id = ?", [run])
            return rows.fetchone()[0]


@pytest.fixture(scope="module")
def one_server(tmp_path_factory):
    server = PrefectServer(tmp_path_factory.mktemp("home"))
    yield server
    child.end(server.process)


@pytest.fixture
def server(one_server):
    """The module's server, running; a test may kill it."""
    if one_server.process.poll() is not None:
        one_server.start()
    return one_server


@contextmanager
def client_of(url, **settings):
    """Settings of a client: the server, its key, and more by their names in Prefect."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: KEY} | settings):
        yield


@contextmanager
def answering(status, body):
    """A server that gives every request the same response; yields the URL of its API."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_a_server_with_our_key_can_be_used(server):
    with client_of(server.url):
        facts = require_server(server.url)
    assert facts.authenticated and facts.version == version_here() and facts.warning == ""
    assert abs(facts.clock_skew_s) < 3


def test_a_wrong_key_and_none_are_told_apart(server):
    expected = {
        "semix:another": r"refuses the key that is set here \(HTTP 401\)",
        None: r"requires a key .*; set PREFECT_API_AUTH_STRING",
    }
    for key, message in expected.items():
        with client_of(server.url, **{"api.auth_string": key}):
            assert re.search(message, probe(server.url).reason)


def test_a_client_that_sends_no_tokens_is_told_to(server):
    with client_of(server.url, **{"client.csrf_support_enabled": False}):
        assert "set PREFECT_CLIENT_CSRF_SUPPORT_ENABLED=true" in probe(server.url).reason


@pytest.mark.parametrize("end", ["", "/other"])
def test_another_path_is_no_api(server, end):
    with client_of(server.url), pytest.raises(InputError, match=r"usually ends in /api"):
        require_server(server.url.removesuffix("/api") + end)


def test_what_is_no_prefect_is_named():
    with answering(200, b"<html>") as url, pytest.raises(InputError, match="not a Prefect API"):
        require_server(url)
    with answering(503, b"") as url, pytest.raises(InputError, match=r"errors \(HTTP 503\)"):
        require_server(url)


def test_the_versions_of_both_sides_are_compared():
    with answering(200, b'"2.20.4"') as url:
        expected = rf"runs Prefect 2\.20\.4, but here is {version_here()}: .* same major version"
        with pytest.raises(InputError, match=expected):
            require_server(url)
    with answering(200, b'"3.6.0"') as url:
        assert "whose key can be bypassed; upgrade to 3.6.28" in require_server(url).warning
    with answering(200, b'"3.7.0"') as url:
        assert f"older than {version_here()} here" in require_server(url).warning


def test_every_way_of_not_answering_is_named(server):
    for url, message in {
        "http://127.0.0.1:9/api": "Connection refused",
        "http://nowhere.invalid/api": "not known|resolution",
        server.url.replace("http", "https"): "TLS: WRONG_VERSION_NUMBER.*PREFECT_API_SSL_CERT_FILE",
        "127.0.0.1:4200": "write http://HOST:4200/api",
    }.items():
        with pytest.raises(InputError, match=message):
            require_server(url)


def test_what_is_said_of_a_server_holds_no_secret():
    facts = probe("http://someone:secret@127.0.0.1:9/api")
    assert "secret" not in repr(facts) and facts.url == "http://127.0.0.1:9/api"


def test_the_command_line_says_a_lost_request_in_one_line(capsys):
    with pytest.raises(httpx.ConnectError) as caught:
        httpx.get("http://127.0.0.1:9/api/flows")
    assert explain(caught.value, resumable=True) == 1
    err = capsys.readouterr().err
    assert "error: the server of http://127.0.0.1:9/api/flows does not answer (Conn" in err
    assert "the same command goes on" in err and "not your input" not in err


@pytest.fixture
def flow_on(server, monkeypatch):
    """flow_on(function): a flow's result, on the server that can be killed."""
    from prefect import flow

    from semix.flows.calling import call_flow
    from semix.flows.run_server import prefect_server

    # else the server of all tests is used
    monkeypatch.setattr("semix.flows.run_server._own_server", None)

    def run(function, *, before=lambda: None, **settings):
        with client_of(server.url, **settings), prefect_server() as url:
            before()
            lost = flow(function, name="lost", persist_result=False)
            return call_flow(lost, url, lambda: "2 of 3")

    return run


def test_a_server_that_comes_back_is_waited_for_and_told(server, flow_on):
    from prefect import runtime

    runs = []

    def work():
        runs.append(runtime.flow_run.id)
        server.kill()
        threading.Timer(1.0, server.start).start()
        return "made"

    assert flow_on(work, **{"client.max_retries": 5}) == "made"
    assert server.state(runs[0]) == "COMPLETED"


def test_a_lost_server_is_one_error_that_says_what_is_safe(server, flow_on):
    expected = (
        rf"^the Prefect server at {server.url} does not answer \(Connection refused\); 2 of 3$"
    )
    with pytest.raises(ServerLost, match=expected) as caught:
        flow_on(lambda: server.kill(), **AT_ONCE)
    assert caught.value.exit_status == 1 and logging.raiseExceptions


def test_a_run_that_the_server_forgot_says_so(flow_on):
    from prefect import get_client, runtime

    def work():
        with get_client(sync_client=True) as client:
            client.delete_flow_run(runtime.flow_run.id)

    expected = r"does not know this run any more \(HTTP 404\); was its database wiped\?; 2 of 3$"
    with pytest.raises(ServerLost, match=expected):
        flow_on(work)


@pytest.mark.slow
def test_a_server_that_dies_before_the_work_is_named(server, flow_on):
    with pytest.raises(ServerLost, match=r"server at http://127.* does not answer.*; 2 of 3$"):
        flow_on(lambda: None, before=server.kill)


@pytest.mark.parametrize("end", [RunFailed("2 shards not made"), KeyboardInterrupt("Ctrl-C")])
def test_how_the_work_ended_is_told_as_it_is_though_the_server_was_killed(server, flow_on, end):
    def work():
        server.kill()
        raise end

    with pytest.raises(type(end)) as caught:
        flow_on(work, **AT_ONCE)
    assert caught.value is end


def version_here():
    from importlib.metadata import version

    return version("prefect")


# The real thing: a build by the command line.


@pytest.fixture
def build_on(hasty_config, tmp_path, until):
    """build_on(url): a build by the command line that has committed a shard, and its folder."""
    config, out, processes = tmp_path / "build.json", tmp_path / "mixed", []  # JSON is YAML
    config.write_text(json.dumps(hasty_config.model_dump(mode="json")))
    command = [sys.executable, "-m", "semix.flows.cli", "build", str(config), "--slots=1"]
    command += ["--set", "generator.steps=40", "--out", str(out)]

    def start(url):
        environment = {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": KEY}
        process = child.start(
            command, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        processes.append(process)
        until(lambda: committed(out), timeout_s=280)
        return process, out

    yield start
    for process in processes:
        child.end(process)


def committed(out: Path) -> int:
    return len(list(out.glob("shards/*/*.json")))


def wait_for_end(process) -> tuple[int, str]:
    text = process.communicate(timeout=400)[0]
    return process.returncode, text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("back", ["never", "soon", "wiped"])
def test_a_build_makes_all_whatever_becomes_of_its_server(server, build_on, back):
    process, out = build_on(server.url)
    server.kill()
    if back == "wiped":
        server.wipe()
    if back != "never":
        server.start()
    if back == "soon":
        status, text = wait_for_end(process)
        assert status == 0 and "Traceback" not in text, text
    else:
        reason = {"never": "does not answer", "wiped": "was its database wiped?"}[back]
        check_server_lost(process, out, reason)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_build_makes_all_though_its_own_server_was_killed(build_on):
    process, out = build_on("")
    (own_server,) = below(process.pid, "semix.flows.run_server", direct=True)
    own_server.kill()
    check_server_lost(process, out, "our own Prefect server ended (")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_build_that_is_asked_to_end_does_though_its_server_is_gone(server, build_on, alive):
    process, out = build_on(server.url)
    workers = [worker.pid for worker in below(process.pid, "semix.pipeline.worker")]
    server.kill()
    process.send_signal(signal.SIGTERM)
    status, text = wait_for_end(process)
    assert workers and not any(map(alive, workers))
    root = Root(str(out))
    assert status in (1, 143) and "Traceback" not in text, text
    assert f"go on with: semix resume {root.url}" in text or "the same command goes on" in text
    assert damage(root, full=True) == [] and root.store.list("leases") == []


def check_server_lost(process, out: Path, reason: str) -> None:
    """Check that a build which lost its server ends complete, with one error that says so."""
    status, text = wait_for_end(process)
    root = Root(str(out))
    assert root.missing() == [] and damage(root, full=True) == [] and root.indices(), text
    total = root.plan.num_shards
    message = f"{total} of {total} shards are committed; go on with: semix resume {root.url}"
    errors = re.findall("error: .*", text)  # Prefect's own lines may end without a line break
    assert status == 1 and len(errors) == 1, text
    assert reason in errors[0] and errors[0].endswith(message)
    assert "Traceback" not in text and text.count("Error logging") < 10, text
    assert resume(str(out)).missing() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_locked_database_holds_nothing_up(server, build_on, until):
    process, out = build_on(server.url)
    with sqlite3.connect(server.home / "prefect.db", isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        until(lambda: committed(out) == Root(str(out)).plan.num_shards, timeout_s=280)
        database.execute("ROLLBACK")
    status, text = wait_for_end(process)
    assert status == 0 and "Traceback" not in text, text


@pytest.mark.slow
def test_our_own_server_on_a_locked_database_says_so(tmp_path):
    code = (
        "from semix.flows.cli import explain\nfrom semix.flows.run_server import prefect_server\n"
    )
    code += "import sys\ntry:\n with prefect_server(): pass\n"
    code += "except Exception as error: sys.exit(explain(error))"
    home = {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": ""}

    def run():
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **home},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )

    assert run().returncode == 0  # the database is there now
    with sqlite3.connect(tmp_path / "prefect.db", isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        completed = run()
    assert completed.returncode == 1 and "is locked; end the process" in completed.stderr
