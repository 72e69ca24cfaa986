"""The page of a few handmade runs: its numbers, its honesty and its safety."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from semix.calib.page import (
    ComparedNoise,
    contact_sheet,
    noise_rows,
    provenance,
    write_report,
)
from semix.calib.results import load_methods
from semix.calib.tables import details
from semix.calib.verdicts import first_sentence, headlines, verdicts
from semix.data.dataset import MixedDataset
from semix.data.formats import SeriesRecord
from semix.data.images import ENCODINGS, encode_image
from semix.data.loaded_series import NoiseScores
from semix.data.pace import duration
from semix.data.pages import fixed
from semix.data.stored_images import StoredImages
from semix.data.tar import GroupSample
from tests import handmade
from tests.calib.measured import (
    LIMITS,
    NAUGHTY,
    OOD,
    SHIFT,
    change_rows,
    make_run,
    make_runs,
    measures,
)
from tests.chromium import PROGRAM, chromium

MINUS = "\N{MINUS SIGN}"
VOID = {"meta", "img", "source", "br", "link", "input"}


RANDOM = {"strategy": "random", "stability": None}
NOISES = [
    {"strategy": "select", "stability": 0.9, "scores": [0.5, 0.9, None]},
    {"strategy": "select", "stability": 0.7, "scores": [0.7, 0.1, None]},
    RANDOM,
]
NAMES = (NAUGHTY, "one", "two")
TOO_FEW = "2 seeds are too few to say"


def make_mixed(folder: Path) -> str:
    """A root of one shard: three series of three alphas over two pairs of three classes."""
    alphas = [0.0, 0.5, 1.0]
    weights = [[0.0, 0.4, 1.0], [-0.1, 0.6, 0.9], [0.5, 0.2, 1.2]]
    classes = [[0, 1], [0, 2], [0, 1]]
    encoding = sorted(ENCODINGS)[-1]
    picture = encode_image(torch.zeros(4, 4, 3, dtype=torch.uint8).numpy(), encoding)
    samples = []
    for number, (pair, row) in enumerate(zip(classes, weights, strict=True)):
        labels = [[[pair[0], a], [pair[1], 1 - a]] for a in alphas]
        fields = {"classes": pair, "alphas": alphas, "weights": row, "noise": NOISES[number]}
        fields["names"] = [NAMES[k] for k in pair]
        record = handmade.record(number, **fields)
        series = SeriesRecord.read(json.dumps(record | {"labels": labels}).encode())
        samples.append(GroupSample(series, [picture] * 3, encoding))
    return handmade.root_of(folder / "mixed", samples, NAMES).url


class Page(HTMLParser):
    """Collects what a browser would load, and the text outside of tags."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.resources: list[str] = []
        self.images_without_alt = 0
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        links = ("src", "srcset", "href", "data", "action")
        self.resources += [attributes[name] or "" for name in links if name in attributes]
        self.images_without_alt += tag == "img" and not attributes.get("alt")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    path, runs, mixed = folder / "report.html", make_runs(folder), make_mixed(folder)
    kinds, intervals = {"vector": measures(ece=0.03)}, {"plain": LIMITS}
    change_rows(runs[0], kinds=kinds, intervals=intervals, shift=SHIFT, ood=OOD)
    facts = {
        "seconds": {"build": 30.0, "trainings": 130.0},
        "splits": {"train": 7},
        "limits": ["Two seeds are few."],
        "models": {"generator": NAUGHTY},
    }
    agreement = {"agreed": 5, "images": 6, "share": 5 / 6}
    noises = [ComparedNoise("by choice", MixedDataset(mixed), agreement)]
    write_report(
        path,
        runs=runs,
        mixed=mixed,
        agreement=agreement,
        facts=facts,
        title="A & B",
        compared=noises,
    )
    return path.read_text()


def test_chosen_noise_is_shown_with_its_scores(source):
    text = " ".join(Page(source).text.split())
    # 0.9 and 0.7 were used; 0.5, 0.9, 0.7 and 0.1 were scored; 5 of 6 end points are as intended.
    assert "0.800 ± 0.141" in text
    assert "0.550 ± 0.342 (4)" in text
    assert "83.3 ± 14.5" in text


def test_noises_of_a_mixed_strategy_are_counted_once(tmp_path):
    mixed = MixedDataset(make_mixed(tmp_path))
    (row,) = noise_rows([ComparedNoise("all", mixed, {"share": 1, "images": 2})])
    assert (row.strategy, row.series, row.images) == ("random, select", 3, 9)
    nothing = np.full(3, np.nan)
    mixed.noise = NoiseScores(("random",), np.zeros(3, np.int8), nothing, nothing[:, None])
    (row,) = noise_rows([ComparedNoise("all", mixed, {"share": 1, "images": 2})])
    assert (row.stability, row.candidates, row.agreement) == ("", "", "100.0 ± 19.2")


def test_page_is_well_formed_and_loads_nothing(source: str):
    page = Page(source)
    assert page.open == []
    assert page.tags.count("script") == 1 and "link" not in page.tags
    (script,) = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in source  # and no other script runs
    assert page.resources and all(link.startswith("data:image/") for link in page.resources)
    assert page.images_without_alt == 0
    assert not re.search(r"url\(|@import|https?://", source)


def test_page_escapes_names_that_others_chose(source: str):
    assert NAUGHTY not in source
    assert "&lt;b&gt;&amp;&#34;" in source
    assert NAUGHTY in Page(source).text


def test_page_holds_the_numbers_worked_out_by_hand(source: str):
    text = re.sub(r"\s+", " ", Page(source).text)
    assert "91.00 ± 1.41" in text and "5.00 ± 1.41" in text and "3.50 ± 2.12" in text
    assert f"{MINUS}1.50 [{MINUS}2.00, {MINUS}1.00] " in text  # ECE of CSM against CE, in percent
    assert "+0.150 [+0.100, +0.200] " in text  # NLL
    assert f"CSM {TOO_FEW}" in text  # of the line that has these intervals
    assert "T = 2.00 ± 0.71" in text
    assert "83.3 % (5 of 6)" in text
    assert "Spearman(alpha, weight), median over series1.000" in text  # of rho 1, 1 and 0.5
    assert "series whose weight falls somewhere along alpha33.3 %" in text
    # A stage may hold the trainings, so that the two sums are kept apart.
    assert "Time by stage build30 s trainings2 min 10 s together2 min 40 s" in text
    assert "each run CE1 min 5 s CSM1 min 5 s together2 min 10 s" in text
    assert "Two seeds are few." in text


def test_headline_says_what_changed_and_claims_nothing_of_two_seeds(runs: list[Path]):
    first, second, scaled = (s.replace("\xa0", " ") for s in headlines(load_methods(runs)))
    assert first == (
        "Over 2 seeds, CSM against CE: no significant difference in ECE (5.00 ± 1.41 % → "
        f"3.50 ± 2.12 %, change {MINUS}1.50 [{MINUS}2.00, {MINUS}1.00]; {TOO_FEW}), "
        f"NLL (0.400 ± 0.141 → 0.550 ± 0.071, change +0.150 [+0.100, +0.200]; {TOO_FEW}) and "
        "accuracy (91.00 ± 1.41 % → 92.00 ± 0.00 %, change +1.00 [+0.00, +2.00])."
    )
    assert second.startswith("Over 2 seeds, CSM + MaC-Cal against CE: ")
    assert scaled == (
        "After temperature scaling, mean ECE is 2.50 ± 0.71 % for CE, 1.75 ± 1.06 % for CSM and "
        "1.75 ± 1.06 % for CSM + MaC-Cal."
    )


def test_the_first_look_names_the_best_and_how_certain_that_is(tmp_path: Path):
    def method(name: str, correct: float, over: float) -> Path:
        values = {"accuracy": correct, "ece": over, "over_ece": over, "under_ece": 0.0}
        return make_run(tmp_path / name, name, [{**values, "nll": 0.3}] * 3)

    methods = load_methods([method("CE", 0.9, 0.05), method("X", 0.89, 0.02)])
    first, second = lines = verdicts(methods)
    assert (first.correct, first.confidence, first.gap) == (
        "90.00",
        "95.00",
        "5.0 points overconfident",
    )
    assert (first.calibration, first.best, first.change) == ("baseline", False, "")
    assert (second.calibration, second.accuracy, second.best) == ("better", "worse", True)
    assert second.change == f"{MINUS}3.00 [{MINUS}3.00, {MINUS}3.00]"
    assert first_sentence(methods, lines).replace("\xa0", " ") == (
        "X is calibrated best as trained: on average it is 91.00 % confident and 89.00 % correct; "
        "CE is 95.00 % confident and 90.00 % correct (the difference in ECE is significant)."
    )
    other_way = methods[::-1]
    assert first_sentence(other_way, verdicts(other_way)).endswith(
        "correct; no other method has a lower ECE."
    )


def test_headline_says_better_and_worse_where_intervals_of_three_seeds_do(tmp_path: Path):
    def runs_of(name: str, ece: float, accuracy: float, nll: list[float]) -> Path:
        metrics = [
            {"ece": ece + 0.01 * k, "accuracy": accuracy, "nll": x} for k, x in enumerate(nll)
        ]
        return make_run(tmp_path / name, name, metrics)

    old, new = runs_of("CE", 0.2, 0.9, [0.2, 0.3, 0.4]), runs_of("X", 0.1, 0.8, [0.3, 0.3, 0.3])
    first = headlines(load_methods([old, new]))[0].replace("\xa0", " ")
    text = re.sub(r" \(.*?\)", "", first)
    assert (
        text == "Over 3 seeds, X against CE: better in ECE; worse in accuracy; no significant "
        "difference in NLL."
    )


def test_headline_of_one_seed(tmp_path: Path):
    methods = load_methods([make_run(tmp_path / n, n, [{"ece": 0.1}]) for n in ("CE", "X")])
    first = headlines(methods)[0].replace("\xa0", " ")
    start = "Over 1 seed, X against CE: no significant difference in ECE (10.00 % → 10.00 %, "
    assert first.startswith(f"{start}change +0.00), ")


def test_methods_on_two_datasets_are_not_compared(tmp_path: Path):
    good, bad = {"accuracy": 0.9, "ece": 0.1}, {"accuracy": 0.8, "ece": 0.2}
    runs = [
        make_run(tmp_path / f"{data}-{name}", name, [values], real=(data, data[0] * 64))
        for data in ("digits", "birds")
        for name, values in (("CE", bad), ("LS", good))
    ]
    page = tmp_path / "page.html"
    write_report(page, runs=runs, mixed=None, agreement=None, facts={}, title="two")
    text = " ".join(Page(page.read_text()).text.split())
    for data in ("digits", "birds"):
        assert (
            f"Over 1 seed, LS, {data} against CE, {data}: no significant difference in ECE" in text
        )
        assert f"On {data}" in text and f"Difference to CE, {data}" in text
        assert f"The test set of {data} has 3 images" in text
    assert "birds against CE, digits" not in text
    assert f"each run CE in {runs[0]}1 min 5 s" in text and "together4 min 20 s" in text
    assert "Time by stage" not in text  # `facts` has no seconds per stage
    # In each of four groups of rows: accuracy and ECE of LS alone, four more measures of both.
    assert page.read_text().count('class="best"') == 4 * (2 + 2 * 4)


def test_small_texts():
    assert [duration(s) for s in (4.23, 72.4, 120, 3725)] == [
        "4.2 s",
        "1 min 12 s",
        "2 min",
        "1 h 2 min",
    ]
    assert [fixed(value) for value in (0.756, -0.001, -0.5)] == ["0.76", "0.00", f"{MINUS}0.50"]


def test_sheet_ends_with_the_least_ordered_series(tmp_path: Path):
    mixed = MixedDataset(make_mixed(tmp_path))
    got = contact_sheet(mixed)
    assert [series.group for series in got] == [0, 1, 2]
    worst = "least ordered of all, \N{GREEK SMALL LETTER RHO} 0.50"
    assert [series.note == worst for series in got] == [False, False, True]
    assert (got[0].first, got[0].second) == (NAUGHTY, "one")
    assert [frame.first for frame in got[0].frames] == [0.0, 0.5, 1.0]
    assert [frame.weight for frame in got[0].frames] == pytest.approx([0.0, 0.4, 1.0])


def test_a_mixed_dataset_is_not_decoded_for_a_page_that_shows_a_dozen_series(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    decoded: list[int] = []

    def decode(self: StoredImages, group: int, position: int) -> np.ndarray:
        decoded.append(group)
        return np.zeros(self.size, np.uint8)

    monkeypatch.setattr(StoredImages, "decode", decode)
    root, page = handmade.make_root(tmp_path / "root", 10, 5), tmp_path / "page.html"
    write_report(page, runs=runs, mixed=root.url, agreement=None, facts={}, title="one")
    assert 0 < len(set(decoded)) <= 12  # of 50


def test_end_points_that_nobody_judged_say_what_would(tmp_path: Path):
    page, mixed = tmp_path / "page.html", make_mixed(tmp_path)
    runs = make_runs(tmp_path)
    write_report(page, runs=runs, mixed=mixed, agreement=None, facts={}, title="no judge")
    text = " ".join(Page(page.read_text()).text.split())
    assert "it takes a classifier of real images, semix audit ROOT --judge RUN" in text


def test_provenance_shows_only_settings_that_differ(runs: list[Path]):
    got = provenance(runs, {"command": "semix", "models": {"unet": {"width": 8}}})
    absent = "\N{EN DASH}"
    assert got.settings == [("head.method", [absent, "mac_cal"]), ("mixed.weight", [absent, "1.0"])]
    assert got.other == {"further facts": {"command": "semix"}, "models": {"unet.width": "8"}}


def test_what_else_was_measured_is_shown_where_it_was(source: str, runs: list[Path]):
    assert [table.title for table in details(load_methods(runs))] == [
        "Post-hoc calibration",
        "Improvement in proper scores",
        "Selective prediction",
    ]
    text = " ".join(Page(source).text.split())
    assert "CE + vector scaling50.00 ± 0.003.00 ± 0.00" in text
    assert "CE91.00 ± 1.41 [10.00, 20.00]5.00 ± 1.41 [10.00, 20.00]" in text
    assert "Mean over 1 corruptions x 2 severities of 1,200 images, ECE of 10 bins" in text
    assert "CE70.00 ± 0.0012.00 ± 0.008.00 ± 0.001.000 ± 0.0000.400 ± 0.000" in text
    assert f"CE, {NAUGHTY}91.00 ± 0.0040.00" in text
    assert "CE, mean over sets91.00 ± 0.0045.00" in text
    assert "isotonic" not in text


@pytest.mark.process
@pytest.mark.skipif(not PROGRAM, reason="no Chromium on this machine")
def test_its_tables_sort_and_their_methods_stay_together(source: str, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(source)
    labels = "[...document.querySelectorAll('.glance tbody th')].map(each => each.textContent)"
    rows = "[...document.querySelectorAll('.measures tbody th')].map(each => each.textContent)"
    with chromium(tmp_path / "profile") as page:
        page.go(path.as_uri())
        assert page.run(labels)[0] == "CE"
        page.run("document.querySelectorAll('.glance thead button')[1].click()")
        assert page.run(labels)[0] == "CE"  # the least accurate first: 91 %
        page.run("document.querySelectorAll('.glance thead button')[1].click()")
        assert page.run(labels)[-1] == "CE"
        before = page.run(rows)
        page.run("document.querySelectorAll('.measures thead button')[0].click()")
        assert sorted(page.run(rows)) == sorted(before)
        assert all("scaling" in text for text in page.run(rows)[1::2])
        assert page.errors == []
