"""The audit of roots made by hand: values worked out beforehand, flags, damage, label sets."""

import json
import re

import numpy as np
import pytest

from semix.data.formats import PROTOTYPES, SeriesLabels
from semix.data.images import encode_image
from semix.data.pages import DARK, LIGHT
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.tar import GroupSample
from semix.pipeline.audit import Audit, as_json, audit
from semix.pipeline.audit.page import pair_rows, write_page
from tests import featured, handmade
from tests.handmade import committed

COUNT = 4
ALPHAS = [0.0, 0.3, 0.7, 1.0]
# Classes and weights of each group; the labels are alpha itself.
SERIES = [
    ([0, 1], [-0.2, 0.1, 0.8, 1.3]),  # Spearman 1
    ([0, 1], [0.0, 0.6, 0.5, 1.0]),  # 0.8
    ([0, 2], [1.0, 0.9, 0.1, 0.0]),  # -1
    ([1, 2], [0.0, 0.2, 0.6, 1.0]),  # 1
]
NAUGHTY = '<b>&"'


def series(group: int, **changes) -> GroupSample:
    classes, weights = SERIES[group]
    labels = [[[classes[0], a], [classes[1], 1 - a]] for a in ALPHAS]
    fields = {"classes": classes, "weights": weights, "labels": labels, "alphas": ALPHAS}
    fields["names"] = [(NAUGHTY, "dog", "fox")[k] for k in classes]
    return handmade.sample(group, COUNT, side=16, **(fields | changes))


def make(folder, *, features=None, **changes) -> Root:
    samples = [series(group, **changes) for group in range(4)]
    names = (NAUGHTY, "dog", "fox")
    return featured.root_of(folder, [samples[:3], samples[3:]], features=features, names=names)


def run(root: Root, **options) -> Audit:
    judge = options.pop("judge", None)
    return audit(PinnedRoot(root, **options), judge=judge, judge_name=judge and "a test")


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Audit:
    # Group 1 shows a fox where it should show a cat (alpha 1).
    features = {1: featured.VECTORS[[1, 1, 0, 2]]}
    return run(make(tmp_path_factory.mktemp("root"), features=features))


def test_correlation_by_hand(complete):
    values = complete.values["overall"]["correlation"]
    assert values["median"] == pytest.approx(0.9)
    assert values["mean"] == pytest.approx((1 + 0.8 - 1 + 1) / 4)
    assert values["not_monotone"] == 0.5
    assert values["negative"] == 0.25
    assert sum(values["histogram"]["counts"]) == 4


def test_end_points_by_hand(complete):
    values = complete.values["overall"]["end_points"]
    # A fox is as near to cat as to dog; the first of the two in the list of classes wins.
    assert values["nearest_prototype"] == {"agreed": 7, "images": 8, "share": 7 / 8}
    assert values["nearest_of_series"] == {"agreed": 8, "images": 8, "share": 1.0}
    assert values["judge"] is None


def test_labels_and_classes_by_hand(complete):
    overall, classes = complete.values["overall"], complete.values["classes"]
    counts = overall["labels"]["first_class"]["counts"]
    assert [counts[0], counts[6], counts[13], counts[19]] == [4, 4, 4, 4]
    entropy = -(0.3 * np.log(0.3) + 0.7 * np.log(0.7)) / 2  # of half the images; else 0
    assert overall["labels"]["entropy_mean"] == pytest.approx(entropy)
    assert [one["mass"] for one in classes] == pytest.approx([6.0, 6.0, 4.0])
    assert [one["series"] for one in classes] == [3, 3, 2]
    assert [one["images"] for one in classes] == [12, 12, 8]
    assert [one["correlation"] for one in classes] == pytest.approx([0.8 / 3, 2.8 / 3, 0.0])
    assert [(c["end_points_agreed"], c["end_points"]) for c in classes] == [(2, 3), (3, 3), (2, 2)]


def test_labels_over_all_classes_are_measured_by_all_of_them(tmp_path):
    """As the rule `similarity` gives them; they are no undecided labels of two classes."""
    labels = [[[0, 0.8], [1, 0.15], [2, 0.05]]] * COUNT
    checked = run(make(tmp_path, labels=labels))
    values = checked.values["overall"]["labels"]
    assert values["over_all_classes"] and values["entropy_most"] == pytest.approx(np.log(3))
    (check,) = [check for check in checked.checks if check.name == "mean entropy of labels"]
    assert check.ok  # 0.56 of three equal labels', 0.88 of two
    even = run(make(tmp_path / "even", labels=[[[0, 0.34], [1, 0.33], [2, 0.33]]] * COUNT))
    (check,) = [check for check in even.checks if check.name == "mean entropy of labels"]
    assert not check.ok and "--set annotation.temperature=T" in check.advice


def test_pairs_by_hand(complete):
    values = complete.values["pairs"]
    assert values["classes"] == [[0, 1], [0, 2], [1, 2]]
    assert values["series"] == [2, 1, 1]
    assert values["correlation_median"] == pytest.approx([0.9, -1.0, 1.0])
    assert values["correlation_mean"] == pytest.approx([0.9, -1.0, 1.0])
    assert values["negative"] == [0.0, 1.0, 0.0]
    assert values["not_monotone"] == [0.5, 1.0, 0.0]
    assert values["end_points_nearest"] == [0.75, 1.0, 1.0]
    assert values["labels"][0] == [2, 0, 0, 2, 0, 0, 0, 2, 0, 2]
    assert "end_points_judge" not in values


def test_flags_name_groups(complete):
    flags = complete.values["flags"]
    assert flags["backwards"] == [2]
    assert flags["not_monotone"] == [1, 2]
    assert flags["end_points"] == [1]
    assert flags["duplicate"] == flags["still"] == flags["degenerate"] == []
    assert complete.flags.index == "index/0.json" and complete.flags.labels is None


def test_checks_ask_for_a_look(complete):
    look = {check.name for check in complete.checks if not check.ok}
    assert look == {"series that run backwards", "end points nearest to their class"}


def test_a_judge_sees_each_unmixed_image_once(tmp_path):
    root, judged = make(tmp_path), []

    def judge(images: np.ndarray) -> np.ndarray:
        judged.append(images)
        return np.zeros(len(images), dtype=np.int64)

    values = run(root, judge=judge).values
    expected = [handmade.pixels(g, COUNT, 16)[[0, 3]] for g in range(4)]
    np.testing.assert_array_equal(np.concatenate(judged), np.concatenate(expected))
    # Of (1, 0), (1, 0), (2, 0), (2, 1) three are of class 0.
    assert values["overall"]["end_points"]["judge"] == {"agreed": 3, "images": 8, "share": 3 / 8}
    assert values["pairs"]["end_points_judge"] == [0.5, 0.5, 0.0]


def test_bad_pictures_are_flagged(tmp_path):
    """Group 1 repeats a picture of group 0, 2 holds black ones, 3 does not move."""
    pictures = [list(handmade.pixels(group, COUNT, 16)) for group in range(4)]
    pictures[1][2] = pictures[0][3]
    pictures[2][0] = pictures[2][1] = np.zeros_like(pictures[2][0])
    pictures[3][2] = pictures[3][1]
    samples = [
        GroupSample(series(g).record, [encode_image(i, "webp") for i in images], "webp")
        for g, images in enumerate(pictures)
    ]
    features = {0: np.full((COUNT, 4), np.inf)}
    values = run(featured.root_of(tmp_path, [samples], features=features)).values
    assert values["flags"]["duplicate"] == []  # pictures of group 0 are faulty themselves
    assert values["flags"]["degenerate"] == [0, 2]
    assert values["flags"]["still"] == [3]
    assert values["flags"]["end_points"] == [0]
    assert values["overall"]["degenerate"] == {
        "images": 6,
        "flat": 2,
        "black": 2,
        "white": 0,
        "not_finite": 4,
    }
    values = run(featured.root_of(tmp_path / "finite", [samples])).values
    assert values["flags"]["duplicate"] == [1]
    assert values["duplicates"] == [{"group": 1, "like": 0, "same_pixels": True}]


def test_what_was_recorded_of_encoders_and_noises_is_summed(tmp_path):
    difference = [0.0, 0.1, 0.2, 0.5]
    changes = {
        "agreement": {"weights": ALPHAS, "difference": difference},
        "noise": {"strategy": "select", "stability": 0.75},
    }
    values = run(make(tmp_path, **changes)).values
    disagreement = values["overall"]["disagreement"]
    assert (disagreement["recorded"], disagreement["mean"], disagreement["most"]) == (
        16,
        pytest.approx(0.2),
        0.5,
    )
    assert values["overall"]["stability"]["median"] == 0.75
    names = [check["name"] for check in values["checks"]]
    assert names[-2:] == ["second encoder differs", "noise stability"]


def test_simplex_series_have_a_correlation_for_each_class(tmp_path):
    mixture = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0.5, 0.25, 0.25]]
    changes = {
        "classes": [0, 1, 2],
        "names": ["a", "b", "c"],
        "alphas": [row[0] for row in mixture],
        "mixture": mixture,
        "weights": [row[0] for row in mixture],
        "coordinates": [[row[0], row[2], row[1]] for row in mixture],  # b and c exchanged
        "labels": [[[k, p] for k, p in enumerate(row)] for row in mixture],
    }
    values = run(make(tmp_path, **changes)).values
    crossed = -1.75 / 4.5  # of ranks (0.5, 3, 0.5, 2) and (0.5, 0.5, 3, 2)
    rho = [one["correlation"] for one in values["classes"]]
    assert rho[0] == pytest.approx(1.0)
    assert rho[1] == rho[2] == pytest.approx(crossed)
    assert values["overall"]["correlation"]["mean"] == pytest.approx(sum(rho) / 3)
    assert values["overall"]["correlation"]["not_monotone"] is None
    assert values["overall"]["weight_curve"] is None
    assert values["overall"]["end_points"]["nearest_prototype"]["images"] == 12
    assert values["pairs"]["classes"] == [[0, 1, 2]]


def make_label_set(root: Root) -> str:
    """Write a label set whose weights are reversed; returns its digest."""
    annotation = {"rule": "projection", "model": "m"}
    labels = handmade.label_set(root, plan=root.plan.digest, annotation=annotation)
    root.store.put(labels.prototypes, root.store.get(PROTOTYPES))
    for entry in root.records():
        groups = [
            SeriesLabels(
                group=number,
                weights=[1 - weight for weight in SERIES[number][1]],
                labels=[[(k, 0.5) for k in SERIES[number][0]] for _ in ALPHAS],
            )
            for number in entry.group_numbers
        ]
        assert labels.commit(entry.shard, images=entry.sha256, groups=groups)
    return labels.digest


def test_a_label_set_is_audited_in_place_of_the_shards_labels(tmp_path, complete):
    root = make(tmp_path)
    digest = make_label_set(root)
    values = run(root, labels=digest[:8]).values
    assert values["labels"] == digest
    mean = complete.values["overall"]["correlation"]["mean"]
    assert values["overall"]["correlation"]["mean"] == pytest.approx(-mean)
    assert values["overall"]["labels"]["entropy_mean"] == pytest.approx(np.log(2))
    assert [one["mass"] for one in values["classes"]] == pytest.approx([6.0, 6.0, 4.0])
    assert run(root).values["labels"] is None


@pytest.mark.parametrize("damage", ["tar", "features", "cut", "image"])
def test_a_damaged_shard_is_named_and_the_others_are_measured(tmp_path, damage):
    root = make(tmp_path)
    shard = committed(root)[0]
    name = shard.features.name if damage == "features" else shard.tar
    content = root.store.get(name)
    if damage == "image":
        broken = series(0)
        broken.images[1] = b"RIFF" + bytes(60)
        tar = handmade.tar_of(broken, series(1), series(2))
        root.store.put(name, tar + bytes(max(0, len(content) - len(tar))))
    elif damage == "cut":
        root.store.put(name, content[: len(content) // 2])
    else:
        root.store.delete(name)
    values = run(root).values
    assert values["series"] == 1
    assert list(values["unreadable"]) == [0]
    assert values["unreadable"][0].startswith(name)
    assert values["checks"][0]["name"] == "unreadable shards"
    assert values["overall"]["correlation"]["mean"] == 1.0
    assert values["flags"]["backwards"] == []
    if damage == "image":
        assert values["unreadable"][0].endswith("does not have the recorded SHA-256")


def test_nothing_to_read_is_an_error(tmp_path):
    root = make(tmp_path)
    for entry in root.records():
        root.store.delete(entry.tar)
    with pytest.raises(
        ValueError, match=r"no shard of index/0.json can be read: shards/0000/.*not"
    ):
        run(root)


def test_numbers_are_json_without_nan(complete):
    parsed = json.loads(as_json(complete.values), parse_constant=lambda text: pytest.fail(text))
    assert parsed["overall"] == complete.values["overall"]
    assert parsed["flags"] == complete.values["flags"]


def test_the_page_is_self_contained_and_escapes_names(complete, tmp_path):
    page = tmp_path / "audit.html"
    write_page(page, complete, title=f"Audit of {NAUGHTY}")
    text = page.read_text()
    assert NAUGHTY not in text and "&lt;b&gt;&amp;&#34;" in text
    assert not re.search(r"<script|<link|url\(|@import|https?://", text)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert sources and all(source.startswith("data:image/webp;base64,") for source in sources)
    for tag in ("section", "div", "figure", "table", "tr", "dl", "svg", "ul"):
        assert text.count(f"<{tag}") == text.count(f"</{tag}>"), tag
    assert "2 of 10 checks ask for a look" in text
    assert "Worst series" in text and "End points of another class" in text
    assert "series 2, \N{GREEK SMALL LETTER RHO} \N{MINUS SIGN}1.00" in text
    for theme in (LIGHT, DARK):  # the same colours as in the figures
        assert f"--first: {theme.first};" in text and f"--second: {theme.second};" in text
    cells = re.findall(r"<td(.*?)>", text)  # where rows are stacked, each says what it is
    assert cells.count("") == 10 and len(cells) > 10  # except the remedy of a check


def test_pairs_are_in_the_order_of_their_correlation_then_of_their_end_points():
    pairs = {
        "classes": [[0, 1], [0, 2], [1, 2], [2, 3]],
        "series": [1, 1, 1, 1],
        "correlation_mean": [0.5, 0.9, 0.5, 0.5],
        "end_points_nearest": [1.0, 0.0, None, 0.5],
        "labels": [[1, 1]] * 4,
    }
    rows = pair_rows(pairs, ["a", "b", "c", "d"])
    assert [row["classes"] for row in rows] == [[2, 3], [0, 1], [1, 2], [0, 2]]


def test_the_page_does_not_list_half_a_million_pairs(complete, tmp_path, monkeypatch):
    monkeypatch.setattr("semix.pipeline.audit.page.ROWS", 1)
    page = tmp_path / "audit.html"
    write_page(page, complete, title="t")
    dash = "\N{EN DASH}"
    rows = re.findall(rf'<th scope="row">([^<]*{dash}[^<]*)</th>', page.read_text())
    assert [row.split(dash)[1] for row in rows] == [" fox", " fox"]  # the worst and the best
