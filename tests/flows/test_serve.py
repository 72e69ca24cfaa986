import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    Settings,
    get_current_settings,
    temporary_settings,
)

from data.errors import InputError
from flows.server import backends, standing
from flows.server.backends import check_database, check_redis
from flows.server.standing import check_key, check_port, is_loopback
from tests.servers import free_port

KEY = "semix:3f1c0a97be2d4856"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_beyond_the_loopback_only_with_a_key(host):
    refusal = r"AUTH_STRING = \(not set\): needed to listen at .* can run commands on its workers"
    with pytest.raises(InputError, match=refusal) as caught:
        check_key("", host)
    assert "PREFECT_API_AUTH_STRING to the same on every client" in str(caught.value)
    check_key(KEY, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_the_loopback_needs_no_key(host):
    assert is_loopback(host)
    check_key("", host)


@pytest.mark.parametrize(
    "key", ["nocolon-but-very-long-0123456789", ":abcdefgh12345678", "someone:"]
)
def test_a_key_is_user_and_password(key):
    with pytest.raises(InputError, match=r"= \(not shown\): write it as user:password") as caught:
        check_key(key, "127.0.0.1")
    assert key not in str(caught.value)


@pytest.mark.parametrize("password", ["hunter2", "fifteen-letters", "ab" * 20])
def test_a_key_that_can_be_guessed_is_refused(password):
    with pytest.raises(InputError, match=r"= \(not shown\): its password can be guessed") as caught:
        check_key(f"semix:{password}", "0.0.0.0")
    assert password not in str(caught.value)


@pytest.mark.process
def test_the_key_that_the_remedy_makes_is_one():
    program = standing.MAKE_KEY.split('"')[1]
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    check_key(made.stdout.strip(), "0.0.0.0")


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"--port = {port}: cannot listen at 127\.0\.0\.1:"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_a_host_that_is_none_of_ours_is_named():
    with pytest.raises(InputError, match="--host = no such host: no address of this machine"):
        is_loopback("no such host")
    with pytest.raises(InputError, match=r"cannot listen at 192\.0\.2\.7:4200 \("):
        check_port("192.0.2.7", 4200)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", r"--database = \(not shown\): no URL; write postgresql\+asyncpg://user"),
        ("mysql://u:hidden@host/name", r"= mysql://u:\*\*\*@host/name: Prefect knows postgresql\+"),
        ("postgresql://u:hidden@host/name", r"Prefect knows postgresql\+asyncpg://"),
        ("sqlite+aiosqlite://", "would be lost with the server; name a file"),
        ("sqlite+aiosqlite:////proc/version/prefect.db", "/proc/version cannot be written"),
    ],
)
def test_a_database_that_cannot_be_is_named(url, told):
    with pytest.raises(InputError, match=told) as caught:
        check_database(url)
    assert "hidden" not in str(caught.value)


def test_a_database_that_does_not_answer_is_named():
    url = f"postgresql+asyncpg://prefect:hidden@127.0.0.1:{free_port()}/prefect"
    told = r"prefect:\*\*\*@127\.0\.0\.1:\d+/prefect: no PostgreSQL answers there"
    with pytest.raises(InputError, match=told) as caught:
        check_database(url)
    assert "hidden" not in str(caught.value)


def test_a_sqlite_file_that_is_locked_or_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "TIMEOUT_S", 0.1)
    path = tmp_path / "prefect.db"
    url = f"sqlite+aiosqlite:///{path}"
    assert check_database(url) == url  # not there yet: the server makes it
    with sqlite3.connect(path) as holder:
        holder.execute("CREATE TABLE runs (id)")
    assert check_database(url) == url
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(InputError, match=r"cannot be written \(database is locked\); end what"):
        check_database(url)
    holder.close()
    path.write_text("these are no pages of a database" * 100)
    with pytest.raises(InputError, match=r"cannot be written \(file is not a database\)"):
        check_database(url)


def test_redis_that_does_not_answer_is_named(monkeypatch):
    assert check_redis(get_current_settings().server) is False
    monkeypatch.setenv("PREFECT_MESSAGING_BROKER", "prefect_redis.messaging")
    monkeypatch.setenv("PREFECT_REDIS_MESSAGING_URL", f"redis://:hidden@127.0.0.1:{free_port()}/0")
    told = r"Redis = 127\.0\.0\.1:\d+/0: Redis does not answer \(.*PREFECT_REDIS_MESSAGING_"
    with pytest.raises(InputError, match=told) as caught:
        check_redis(Settings().server)
    assert "hidden" not in str(caught.value)


def test_what_the_owner_set_wins_by_any_of_its_names(monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_CSRF_PROTECTION_ENABLED", "false")  # an older name
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED", "events")
    chosen = standing.environment(Settings(), origin="http://127.0.0.1:4200")
    assert "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED" not in chosen
    assert chosen["PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED"] == "events"
    assert chosen["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    with pytest.MonkeyPatch.context() as theirs:
        for name, value in chosen.items():
            theirs.setenv(name, value)
        server = Settings().server
    assert server.api.csrf_protection_enabled is False
    assert server.analytics_enabled is False
    assert server.services.task_run_recorder.read_batch_size == 500
    assert server.api.cors_allowed_origins == "http://127.0.0.1:4200"


def test_the_server_speaks_for_itself():
    """Importing flows silences Prefect's console, for runs; a server's warnings are wanted."""
    assert os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] == "CRITICAL"
    chosen = standing.environment(Settings(), origin="")
    assert "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL" not in chosen


def test_a_server_tells_what_clients_set(tmp_path):
    database = f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    port = free_port()
    with temporary_settings({PREFECT_SERVER_API_AUTH_STRING: KEY}):
        told = standing.described(standing.prepare("0.0.0.0", port, database))
    name = socket.gethostname()
    assert told["on clients"].startswith(f"export PREFECT_API_URL=http://{name}:{port}/api; ")
    assert "export PREFECT_API_AUTH_STRING=" in told["on clients"]
    assert KEY.partition(":")[2] not in json.dumps(told)
    assert told["database"] == database
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: database}):
        told = standing.described(standing.prepare(port=port))
    assert told["pages"] == f"http://127.0.0.1:{port}"
    assert told["authentication"].startswith("off")
    assert not Path(tmp_path / "prefect.db").exists()
