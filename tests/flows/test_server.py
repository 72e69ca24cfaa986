import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import httpx
import psutil
import pytest

import semix.flows.run_server
from semix.flows import child
from semix.flows.run_server import Server, prefect_server
from semix.flows.server_probe import authorization
from tests.family import below


def servers() -> list[int]:
    """Process ids of the server processes that we started."""
    return [server.pid for server in below(os.getpid(), "semix.flows.run_server", direct=True)]


def in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
    )


def test_one_server_however_deep_the_blocks(prefect_api):
    with prefect_server() as outer, prefect_server() as inner:
        assert outer == inner == prefect_api
        assert len(servers()) == 1
    assert json.load(urlopen(f"{prefect_api}/ready")) == {"message": "OK"}


def test_the_server_listens_on_the_loopback_alone(prefect_api):
    sockets = psutil.Process(servers()[0]).net_connections("tcp")
    assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_the_server_knows_its_own_pages_address(prefect_api):
    settings = json.load(urlopen(f"{prefect_api.removesuffix('/api')}/ui-settings"))
    assert settings["api_url"] == prefect_api


def test_a_page_from_elsewhere_can_neither_read_nor_change_anything(prefect_api):
    elsewhere = {"Origin": "http://elsewhere.example"}
    preflight = {**elsewhere, "Access-Control-Request-Method": "POST"}
    preflight_response = httpx.options(f"{prefect_api}/work_pools/", headers=preflight)
    headers = elsewhere | authorization()
    token_response = httpx.get(f"{prefect_api}/csrf-token?client=elsewhere", headers=headers)
    for response in (preflight_response, token_response):
        assert "access-control-allow-origin" not in response.headers
    pool = {"name": "theirs", "type": "process"}
    changed = httpx.post(f"{prefect_api}/work_pools/", json=pool, headers=headers)
    assert changed.status_code == 403 and "CSRF" in changed.text


@pytest.mark.process
def test_its_client_sends_tokens_even_where_they_are_turned_off():
    code = (
        "from semix.flows.run_server import prefect_server\n"
        "from prefect.client.orchestration import get_client\n"
        "with prefect_server(), get_client(sync_client=True) as client:\n"
        "    print(client.create_concurrency_limit(tag='ours', concurrency_limit=1))"
    )
    completed = in_a_new_process(code, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED="false")
    assert completed.returncode == 0, completed.stderr


def test_a_configured_server_is_used(prefect_api):
    code = (
        "from semix.flows.run_server import prefect_server\nimport psutil\n"
        "with prefect_server() as url: print(url, len(psutil.Process().children()))"
    )
    completed = in_a_new_process(code, PREFECT_API_URL=prefect_api)
    assert completed.stdout.split() == [prefect_api, "0"], completed.stderr


@pytest.mark.process
def test_a_configured_server_that_is_not_there_is_named():
    code = "from semix.flows.run_server import prefect_server\nwith prefect_server(): pass"
    completed = in_a_new_process(code, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert (
        "InputError: PREFECT_API_URL = http://127.0.0.1:9/api: no Prefect server"
        in completed.stderr
    )


@pytest.mark.process
def test_a_server_that_does_not_start_shows_its_log(tmp_path):
    log = tmp_path / "server.log"
    with log.open("w") as output:
        process = child.start([sys.executable, "-c", "print('no disk'); exit(1)"], stdout=output)
    try:
        with pytest.raises(RuntimeError, match=r"did not start; .*server\.log ends:\nno disk"):
            server = Server("http://127.0.0.1:9/api", log, process, "", tmp_path / "key")
            server.wait_until_ready()
    finally:
        child.end(process)


def test_nothing_is_reported_to_anyone(prefect_api):
    assert os.environ["DO_NOT_TRACK"] == "1"
    environment = psutil.Process(servers()[0]).environ()
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert semix.flows.run_server.SETTINGS.items() <= environment.items()
