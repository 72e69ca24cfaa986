"""`semix browse` in a real browser: click, slide, exclude, back; and a root in a bucket."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from semix.data.browser import Browser
from semix.data.browser.table import Query
from semix.data.flags import flag_series, read_excluded
from semix.data.root import Root
from tests import featured, handmade
from tests.chromium import PROGRAM, chromium

pytestmark = pytest.mark.process
FALLS = [[0.0, 0.2, 0.8, 1.0], [0.0, 0.9, 0.3, 1.0], [0.0, 0.5, 0.4, 1.0]]
HOSTILE = "<img src=x onerror=alert(1)>"
WEIGHT = "document.querySelector('.weight dd')?.textContent"


def samples(shard: int) -> list[handmade.GroupSample]:
    changes = {"alphas": [0.0, 0.25, 0.75, 1.0], "noise": {"strategy": HOSTILE}}
    groups = range(3 * shard, 3 * shard + 3)
    return [
        handmade.sample(group, 4, side=16, weights=FALLS[group % 3], **changes) for group in groups
    ]


@contextmanager
def served(url: str) -> Iterator[str]:
    """The address that the command prints."""
    command = [sys.executable, "-m", "semix.flows.cli", "browse", url]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@pytest.mark.skipif(not PROGRAM, reason="no Chromium on this machine")
def test_click_slide_exclude_back(tmp_path):
    names = ["cat", HOSTILE, "fox"]
    root = featured.root_of(tmp_path / "root", [samples(s) for s in range(20)], names=names)
    with served(root.url) as address, chromium(tmp_path / "profile") as page:
        page.view(1280)
        page.go(address)
        page.until("document.querySelectorAll('#rows a').length == 24")
        assert "token" not in page.run("location.href")
        name = f"series 0{HOSTILE} → cat"
        page.until(f"document.querySelector('#rows a .name').textContent == '{name}'")
        page.until("document.querySelector('#rows img').naturalWidth == 64")
        # The worst first, once all records are read: a link to this view is its address.
        page.run("filters.sort.value = 'fall'; filters.dispatchEvent(new Event('change'))")
        page.until("document.querySelector('#rows a').dataset.group == 1")
        page.click('#rows a[data-group="4"]')
        page.until(f"{WEIGHT} == '0.900'")
        page.press("ArrowRight")
        page.until(f"{WEIGHT} == '0.300'")
        assert page.until("document.querySelector('#image').naturalWidth") == 16
        assert page.run("location.hash") == "#sort=fall&series=4&image=2"
        # Slide to the end; the soft label follows.
        page.run("alpha = document.querySelector('#alpha'); alpha.value = 3")
        page.run("alpha.dispatchEvent(new Event('input'))")
        page.until(f"{WEIGHT} == '1.000'")
        assert page.run("document.querySelector('.bar .first').style.width") == "100%"
        # Exclude, and see what somebody else excluded meanwhile.
        flag_series(root, excluded=[59])
        page.press("x")
        page.until("document.querySelector('#exclude').textContent == 'take back'")
        page.until("document.querySelector('#counts').textContent.includes('2 excluded')")
        assert read_excluded(root).groups == {4, 59}
        page.press("j")
        page.until("location.hash == '#sort=fall&series=7'")
        page.run("history.back()")
        page.until("location.hash == '#sort=fall' && document.querySelector('#series').hidden")
        # Take it back from a deep link, on a phone.
        page.view(390, phone=True)
        page.go(address.split("/?")[0] + "/#state=excluded&series=4")
        page.until("document.querySelector('#place')?.textContent == '1 of 2'")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        page.click("#exclude")
        page.until("document.querySelector('#counts').textContent.includes('1 excluded')")
        assert read_excluded(root).groups == {59}
        assert (
            page.errors == []
            and page.run("document.querySelectorAll('#columns img[src=x]').length") == 0
        )


def test_a_root_in_a_bucket_is_read_by_range_and_marked(bucket, monkeypatch):
    root = handmade.make_root(f"{bucket}/root", shards=3, groups=4, count=4, side=64)
    browser = Browser(Root(root.url))
    assert browser.page(Query(), offset=0, limit=24)["total"] == 12
    content, media_type = browser.image(9, 3)
    assert (content, media_type) == (handmade.sample(9, 4, side=64).images[3], "image/webp")
    assert browser.strip(2)[0] and browser.series(11)["names"] == ["dog", "fox"]
    other = Browser(Root(root.url))
    threads = [
        threading.Thread(target=b.set_excluded, args=(n, True))
        for n, b in enumerate([browser, other])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert browser.excluded(max_age_s=0) == {0, 1}
    browser.measure(threading.Event())
    assert browser.problems == [] and browser.table.measured.all()
