"""Looking at series: measures, filters and orders of the table, pictures by range, damage."""

import io
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from semix.data import quality
from semix.data.browser import Browser
from semix.data.browser.series_reader import SeriesReader
from semix.data.browser.table import Query, measures_of, rank_correlation
from semix.data.errors import InputError
from semix.data.exclusion import store_flags
from semix.data.flags import flag_series
from semix.data.formats import FLAGS, SeriesFlags
from semix.data.images import decode_image
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from tests import featured, handmade
from tests.handmade import committed, make_root, pixels, put_shard, tar_of

ALPHAS = [0.0, 0.3, 0.7, 1.0]
WEIGHTS = [
    [-0.2, 0.1, 0.8, 1.3],  # in order
    [0.0, 0.6, 0.5, 1.0],  # falls by 0.1
    [1.0, 0.9, 0.1, 0.0],  # backwards, and falls by 0.8
    [0.5, 0.5, 0.5, 0.5],
    [0.0, 0.3, 0.7, 1.0],
]


def sample(group: int) -> handmade.GroupSample:
    weights = WEIGHTS[group]
    agreement = {"weights": weights, "difference": [0.0, 0.1 * group, 0.0, 0.05]}
    noise = {"strategy": "select", "stability": 0.9 - 0.2 * group}
    changes = {"alphas": ALPHAS, "weights": weights, "agreement": agreement, "noise": noise}
    return handmade.sample(group, 4, **changes)


def make_measured(folder) -> Browser:
    """Series 0 to 4 in two shards; series 5 was left out of the second."""
    shards = [[sample(0), sample(1), sample(2)], [sample(3), sample(4)]]
    root = featured.root_of(folder, shards, left_out=[{}, {5: "image 1 is flat"}])
    browser = Browser(root)
    browser.measure(threading.Event())
    return browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Browser:
    return make_measured(tmp_path_factory.mktemp("root"))


def shown(browser: Browser, **query) -> list[int]:
    page = browser.page(Query(**query), offset=0, limit=100)
    assert page["total"] == len(page["rows"])
    return [row["group"] for row in page["rows"]]


def test_rank_correlation_is_that_of_the_audit():
    rng = np.random.default_rng(0)
    alphas = rng.random((50, 8)).astype(np.float32)
    weights = np.round(rng.random((50, 8)), 1).astype(np.float32)  # with ties
    expected = quality.spearman(torch.from_numpy(alphas), torch.from_numpy(weights))
    np.testing.assert_allclose(rank_correlation(alphas, weights), expected, rtol=1e-6)
    falls = quality.has_decrease(torch.from_numpy(alphas), torch.from_numpy(weights))
    records = [
        handmade.series_of(handmade.record(0, 8, alphas=a, weights=w))
        for a, w in zip(alphas.tolist(), weights.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(measures_of(records).fall > 0, falls)


def test_the_measures_of_each_series(browser):
    rows = browser.page(Query(), offset=0, limit=100)["rows"]
    assert [row["correlation"] for row in rows] == pytest.approx([1, 0.8, -1, 0, 1, None])
    assert [row["fall"] for row in rows] == pytest.approx([0, 0.1, 0.8, 0, 0, None], abs=1e-6)
    assert [row["disagreement"] for row in rows[:5]] == pytest.approx([0.05, 0.1, 0.2, 0.3, 0.4])
    assert [row["stability"] for row in rows[:5]] == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    assert [row["left_out"] for row in rows] == [None] * 5 + ["image 1 is flat"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"classes": [0]}, [0, 1, 3, 4]),
        ({"classes": [0, 1]}, [0, 3]),
        ({"state": "left_out"}, [5]),
        ({"state": "kept"}, [0, 1, 2, 3, 4]),
        ({"state": "excluded"}, []),
        ({"max_correlation": 0}, [2, 3]),
        ({"min_fall": 0.05}, [1, 2]),
        ({"min_disagreement": 0.25, "max_stability": 0.2}, [4]),
        ({"sort": "correlation"}, [2, 3, 1, 0, 4, 5]),
        ({"sort": "fall"}, [2, 1, 0, 3, 4, 5]),
        ({"sort": "stability"}, [4, 3, 2, 1, 0, 5]),
        ({"sort": "disagreement", "classes": [1]}, [3, 2, 0]),
        ({"sort": "pair"}, [5, 0, 3, 1, 4, 2]),  # the pair of 5, which nobody made, is unknown
        ({"round": 1}, []),
    ],
)
def test_what_a_query_selects_and_in_which_order(browser, query, expected):
    assert shown(browser, **query) == expected


def test_pages_and_neighbours_follow_the_order_of_the_query(browser):
    worst = Query(sort="correlation")
    page = browser.page(worst, offset=2, limit=2)
    assert ([row["group"] for row in page["rows"]], page["total"]) == ([1, 0], 6)
    places = {"position": 2, "total": 6, "previous": 3, "next": 0}
    assert browser.neighbours(worst, 1) == places
    assert browser.neighbours(worst, 2)["previous"] is None
    assert browser.neighbours(Query(min_fall=0.5), 1)["position"] is None


def test_a_limit_shows_only_series_that_were_measured(tmp_path):
    browser = Browser(make_measured(tmp_path).root)
    assert shown(browser) == [0, 1, 2, 3, 4, 5] and shown(browser, min_fall=0) == []
    assert browser.page(Query(), offset=0, limit=1)["rows"][0]["measured"] is False


def test_a_series_has_its_record_and_pictures(browser):
    series = browser.series(1)
    assert series["names"] == ["cat", "fox"] and series["order"] == [0, 1, 2, 3]
    assert series["labels"][0]["weights"] == WEIGHTS[1]
    assert series["labels"][0]["difference"] == [0.0, 0.1, 0.0, 0.05]
    content, media_type = browser.image(1, 2)
    assert media_type == "image/webp"
    np.testing.assert_array_equal(decode_image(content), pixels(1, 4, 8)[2])
    strip, media_type = browser.strip(4)
    assert (Image.open(io.BytesIO(strip)).size, media_type) == ((32, 8), "image/webp")


def test_series_that_are_not_there_are_refused(browser):
    with pytest.raises(InputError, match=r"group = 5: was left out: image 1 is flat"):
        browser.strip(5)
    assert browser.series(5)["left_out"] == "image 1 is flat"
    with pytest.raises(InputError, match=r"group = 6: is in no committed shard"):
        browser.series(6)
    with pytest.raises(InputError, match="image = 4: a series has 4"):
        browser.image(0, 4)
    with pytest.raises(InputError, match="labels = abc: is no label set"):
        browser.series(0, ["abc"])


def test_two_label_sets_beside_each_other(tmp_path):
    browser = make_measured(tmp_path)
    labels = handmade.label_set(browser.root)
    other = [handmade.labels_of(g, 4, weights=[0.5] * 4) for g in range(3)]
    labels.commit(0, images=committed(browser.root)[0].sha256, groups=other)
    browser = Browser(browser.root)
    assert [s["text"] for s in browser.facts()["label_sets"]] == ["ab12ab12ab12: projection"]
    sets = browser.series(1, ["", labels.digest])["labels"]
    assert [values["weights"] for values in sets] == [WEIGHTS[1], [0.5] * 4]
    (missing,) = browser.series(3, [labels.digest])["labels"]
    assert "shard 1 has no labels of this set" in missing["problem"]


def test_excluding_is_seen_by_everyone_and_can_be_undone(tmp_path):
    browser = make_measured(tmp_path)
    other = Browser(browser.root)
    assert other.set_excluded(1, True)["excluded"] is True
    assert browser.set_excluded(3, True)["group"] == 3
    assert browser.excluded() == other.excluded(max_age_s=0) == {1, 3}
    assert shown(browser, state="excluded") == [1, 3]
    assert browser.set_excluded(1, False)["excluded"] is False
    browser.set_excluded(1, False)  # is so already
    assert len(browser.root.store.list("flags")) == 3


def test_flags_of_the_audit_filter(tmp_path):
    root = make_measured(tmp_path).root
    flags = dict.fromkeys(FLAGS, ()) | {"still": [1, 4]}
    digest = PinnedRoot(root).digest
    audit = {"index": "index/0.json", "digest": digest, "labels": None}
    store_flags(root, SeriesFlags(**audit, flags={k: list(v) for k, v in flags.items()}))
    browser = Browser(root)
    assert browser.facts()["flags"] == {"still": 2}
    assert shown(browser, flag="still") == [1, 4] and shown(browser, flag="unknown") == []
    assert browser.page(Query(), offset=4, limit=1)["rows"][0]["flags"] == ["still"]


def test_the_classes_of_the_plan_are_known_before_a_series_is_read(tmp_path):
    root = make_measured(tmp_path).root
    classes = np.array([[0, 1], [0, 2], [1, 2]] * 2)
    browser = Browser(Root(root.url), classes=classes)
    assert shown(browser, classes=[1, 2]) == [2, 5]


def test_a_shard_that_was_made_since_the_index_is_shown(tmp_path):
    root = make_root(tmp_path, shards=3)
    plan = json.loads((tmp_path / "plan.json").read_bytes())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"num_groups": 12, "num_shards": 4}))
    put_shard(
        root.store, 3, tar_of(handmade.sample(9), handmade.sample(11)), first=9, groups=2, count=2,
        left_out={10: "flat"},
    )  # fmt: skip
    browser = Browser(Root(root.url))
    assert shown(browser) == list(range(12)) and browser.problems == []
    assert browser.series(11)["group"] == 11
    (tmp_path / "index" / "0.json").unlink()  # half-built: no index yet
    assert shown(Browser(Root(root.url))) == list(range(12))


def test_damage_is_named_and_everything_else_is_shown(tmp_path):
    root = make_root(tmp_path, shards=4, groups=3)
    tars = [tmp_path / record.tar for record in committed(root).values()]
    tars[0].write_bytes(tars[0].read_bytes()[:-512])
    tars[1].unlink()
    content = bytearray(tars[2].read_bytes())
    image = content.index(b"RIFF", content.index(b"00000007.00"))
    content[image : image + 4] = b"LIFF"
    tars[2].write_bytes(content)
    browser = Browser(root)
    browser.measure(threading.Event())
    assert [problem.split(":")[0].split(" ")[0] for problem in browser.problems] == [
        tar.relative_to(tmp_path).as_posix() for tar in tars[:2]
    ]
    with pytest.raises(ValueError, match=r"-[0-9a-f]{8}\.tar: .* bytes, its record says .*verify"):
        browser.strip(0)
    with pytest.raises(ValueError, match=r"is not in .*; run `semix verify`"):
        browser.series(3)
    with pytest.raises(ValueError, match=r"group 7, image 0: not a complete WebP"):
        browser.image(7, 0)
    assert browser.strip(6)[0] and browser.strip(9)[0]
    assert browser.state()["measured_shards"] == 4


def test_a_tar_that_ends_early_shows_the_series_before_the_damage(tmp_path):
    root = make_root(tmp_path, shards=1, groups=3)
    (record,) = committed(root).values()
    content = bytearray((tmp_path / record.tar).read_bytes())
    start = content.index(b"00000001.00")
    content[start : start + 8] = b"00000002"  # of another series, and another header's checksum
    (tmp_path / record.tar).write_bytes(content)
    browser = Browser(root)
    assert browser.strip(0)[0]
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged tar: header at byte"):
            browser.strip(1)


def test_hostile_names_are_escaped(tmp_path):
    names = ["a\x1b[2J", "cat\u202egnp", "<b>fox"]
    samples = [handmade.sample(0, names=names[:2])]
    browser = Browser(handmade.root_of(tmp_path, samples, names))
    assert browser.facts()["classes"] == [r"a\u001b[2J", r"cat\u202egnp", "<b>fox"]
    assert browser.series(0)["names"] == [r"a\u001b[2J", r"cat\u202egnp"]


def test_an_unfinished_root_and_damaged_flags_are_refused(tmp_path):
    root = make_root(tmp_path / "a", shards=1)
    flag_series(root, excluded=[1])
    (tmp_path / "a" / "flags" / "0.json").write_text("{")
    with pytest.raises(InputError, match=r"flags/0\.json = damaged"):
        Browser(root)
    empty = make_root(tmp_path / "b", shards=0, groups=0)
    with pytest.raises(InputError, match="holds no finished series yet; run `semix resume`"):
        Browser(empty)


def test_a_page_of_the_table_opens_no_shard(tmp_path, monkeypatch):
    browser = Browser(make_root(tmp_path, shards=20, groups=3))
    monkeypatch.setattr(SeriesReader, "_tar", lambda self, entry: pytest.fail(entry.tar))
    assert browser.page(Query(sort="fall"), offset=30, limit=24)["total"] == 60
