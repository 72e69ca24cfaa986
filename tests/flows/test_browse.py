"""The server of `semix browse`: who may ask, and that nothing in a root can execute."""

import io
import json
import re
import threading

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from semix.data.browser import Browser
from semix.data.flags import flag_series, read_excluded
from semix.flows.browse import Measuring
from semix.flows.browse.app import browser_app
from tests.command import semix
from tests.handmade import committed, make_root, root_of, sample

TOKEN = "a" * 43
HOST = "http://127.0.0.1:8100"
MARK = {"group": 1, "excluded": True}
OWN = {"Origin": HOST}


def client_of(root, *, host: str = HOST, token: str | None = TOKEN) -> TestClient:
    """A browser that opened the printed address, unless it has no token."""
    browser = Browser(root)
    measuring = Measuring(browser, threading.Event())
    app = browser_app(browser, token=TOKEN, port=8100, measuring=measuring)
    client = TestClient(app, base_url=host)
    if token is not None:
        client.get(f"/?token={token}")
    return client


@pytest.fixture
def root(tmp_path):
    return make_root(tmp_path / "root")


def test_the_token_becomes_a_cookie_that_no_script_reads(root):
    client = client_of(root, token=None)
    answer = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("semix-browse-8100=") and "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    page = client.get("/")
    assert page.status_code == 200 and TOKEN not in page.text


PATHS = ["/", "/page.js", "/api/root", "/api/series", "/api/series/0", "/strip/0", "/image/0/0"]


def test_without_the_token_nothing_is_answered(root):
    client = client_of(root, token="b" * 43)
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code == 403 and "address that `semix browse` printed" in answer.text
    assert client.post("/api/excluded", json=MARK, headers=OWN).status_code == 403
    assert read_excluded(root).count == 0


@pytest.mark.parametrize(
    "host",
    ["http://evil.example", "http://evil.example:8100", "http://127.0.0.1.evil.example:8100"],
)
def test_a_name_that_was_led_to_the_loopback_is_refused(root, host):
    client = client_of(root, host=host)
    assert client.get(f"/?token={TOKEN}").status_code == 400
    assert (
        client.get("/api/root", headers={"Cookie": f"semix-browse-8100={TOKEN}"}).status_code == 400
    )


@pytest.mark.parametrize("host", ["localhost:8100", "[::1]:8100", "127.0.0.1", "LOCALHOST:9999"])
def test_other_names_of_the_loopback_and_forwarded_ports_are_served(root, host):
    assert client_of(root, host=f"http://{host}").get("/api/root").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:9"}, {"Origin": "null"}],
)
def test_another_page_changes_nothing(root, headers):
    client = client_of(root)
    for path in ("/api/excluded", "/api/measure"):
        assert client.post(path, json=MARK, headers=headers).status_code == 403
    assert read_excluded(root).count == 0
    assert client.post("/api/excluded", json=MARK, headers=OWN).status_code == 200
    assert read_excluded(root).groups == {1}


def test_every_answer_forbids_scripts_of_others_and_guesses_of_its_type(root):
    client = client_of(root)
    for path in [*PATHS, "/page.css", "/nothing", "/api/series/999"]:
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy and "data:" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_has_no_script_or_style_in_its_markup(root):
    page = client_of(root).get("/").text
    assert re.findall(r"<script[^>]*>(.*?)</script>", page) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    assert "innerHTML" not in client_of(root).get("/page.js").text


def test_markup_in_names_stays_text(tmp_path):
    names = ["<img src=x onerror=alert(1)>", "cat\u202egnp"]
    client = client_of(root_of(tmp_path, [sample(0, names=names)], names))
    answer = client.get("/api/series/0")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["names"] == [names[0], r"cat\u202egnp"]


def test_images_come_as_they_are_stored_with_their_type(root):
    client = client_of(root)
    answer = client.get("/image/0/1")
    assert answer.headers["content-type"] == "image/webp"
    assert answer.content == sample(0).images[1]
    strip = client.get("/strip/0?v=12345678")
    assert strip.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(strip.content)).size == (16, 8)


def test_something_else_than_an_image_is_not_served(tmp_path):
    script = sample(0)
    script.images[1] = b"<script>alert(1)</script>"
    client = client_of(root_of(tmp_path, [script], ["cat", "dog", "fox"]))
    answer = client.get("/image/0/1")
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/json")
    assert "group 0, image 1: not a complete WebP, PNG or JPEG image" in answer.json()["error"]
    assert client.get("/strip/0").status_code == 422 and client.get("/image/0/0").status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/series/6", 400, "group = 6: is in no committed shard"),
        ("/image/0/2", 400, "image = 2: a series has 2"),
        ("/api/series/0?labels=ab", 400, "labels = ab: is no label set"),
        ("/api/series?sort=colour", 422, None),
        ("/api/series?limit=0", 422, None),
        ("/api/series?classes=-1", 422, None),
        ("/api/series?offset=1e9", 422, None),
        ("/image/0/..%2f..%2fplan.json", 404, None),
    ],
)
def test_requests_that_make_no_sense(root, path, status, message):
    answer = client_of(root).get(path)
    assert answer.status_code == status
    assert message is None or message in answer.json()["error"]


def test_a_damaged_shard_is_named_and_the_others_are_shown(root):
    tar = committed(root)[0].tar
    root.store.delete(tar)
    client = client_of(root)
    assert tar in client.get("/strip/0").json()["error"]
    assert client.get("/strip/3").status_code == 200


def test_without_write_access_looking_works_and_marking_says_why_not(root, monkeypatch):
    client = client_of(root)

    def refuse(name: str, content: bytes) -> bool:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(root.store, "create", refuse)
    answer = client.post("/api/excluded", json=MARK, headers=OWN)
    assert answer.status_code == 403
    message = f"{root.url} cannot be written (Permission denied); the flag was not stored"
    assert answer.json()["error"] == message
    assert client.get("/api/series").json()["total"] == 6
    assert read_excluded(root).count == 0


def test_records_are_read_when_asked_for(root):
    client = client_of(root)
    before = client.get("/api/root").json()
    assert (before["measuring"], before["measured_shards"]) == (False, 0)
    assert client.post("/api/measure", headers=OWN).json()["measuring"] is True
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(timeout=10)
    assert client.get("/api/state").json()["measured_shards"] == 2
    assert client.get("/api/series?sort=fall&max_correlation=1").json()["total"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--groups", "3"], "--groups = 3: is for a contact sheet; add --out FILE.png"),
        (["--port", "1"], "--port = 1: Permission denied; choose another, or leave it out"),
    ],
)
def test_wrong_options_are_refused(root, arguments, message, monkeypatch):
    if arguments[0] == "--port":
        monkeypatch.setattr("socket.socket.bind", _refuse)
    status, out, err = semix("browse", root.url, *arguments)
    assert (status, out) == (2, "") and message in err


def _refuse(*arguments: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_show_and_status_say_what_is_excluded(root):
    status, out, _ = semix("status", root.url)
    assert status == 0 and "excluded" not in out
    flag_series(root, excluded=[1, 4])
    status, out, _ = semix("show", root.url, "4")
    assert (status, out.splitlines()[1]) == (0, "flags    excluded")
    assert json.loads(semix("show", root.url, "3", "--json")[1])["flags"] == []
    assert json.loads(semix("status", root.url, "--json")[1])["excluded_series"] == 2
    root.store.put("flags/0.json", b"{")
    status, out, _ = semix("status", root.url)
    assert status == 0 and "flags/0.json = damaged" in out and "restore it" in out
