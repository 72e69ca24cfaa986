"""The report of a small handmade study: its numbers, its honesty and its safety."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from calib.metrics import calibration_metrics
from calib.report.evaluation_table import print_evaluation
from calib.report.facets import facets
from calib.report.headline import headlines
from calib.report.methods import MEASURES, load_methods, mean_and_sd, paired
from calib.report.noise import Compared, noise_rows
from calib.report.page import pooled_bins, write_report
from calib.report.provenance import duration, provenance
from calib.report.sheet import contact_sheet
from calib.report.tables import comparison, differences, print_table, summary_table
from data.dataset import MixedDataset
from data.errors import InputError
from data.images import ENCODINGS, encode_image
from data.pages import fixed
from data.tar import GroupSample
from tests import handmade

NAUGHTY = '<b>&"'
MINUS = "\N{MINUS SIGN}"
VOID = {"meta", "img", "source", "br", "link", "input"}
MEASURE = {measure.key: measure for measure in MEASURES}


def measures(**given: float) -> dict[str, float]:
    keys = [measure.key for measure in MEASURES]
    return {key: given.get(key, 0.5) for key in [*keys, "classwise_ece"]}


def make_run(folder: Path, name: str, values: list[dict[str, float]], head: bool = False) -> Path:
    """A finished run with one seed for each entry of `values`; scaling halves its ECE."""
    rows = []
    for seed, given in enumerate(values):
        for stage in ("base", "head") if head else ("base",):
            logits = f"seed-{seed}/logits-{stage}.safetensors"
            (folder / logits).parent.mkdir(parents=True, exist_ok=True)
            tensors = {
                f"{split}_{kind}": value
                for split in ("validation", "test")
                for kind, value in (
                    ("logits", torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])),
                    ("targets", torch.tensor([0, 1, 1])),
                )
            }
            save_file(tensors, folder / logits)
            plain = measures(**given)
            scaled = {**plain, "ece": plain["ece"] / 2}
            row = {"stage": stage, "seed": seed, "temperature": 1.5 + seed, "logits": logits}
            rows.append({**row, "bins": 15, "plain": plain, "scaled": scaled})
    evaluation = {"schema": 2, "name": name, "digest": "d" * 64, "seconds": 65.0, "rows": rows}
    evaluation["versions"] = {"torch": "2.15.0"}
    config = {"name": name, "mixed": {"weight": 1.0} if "CSM" in name else None, "epochs": 3}
    for file, content in (("evaluation", evaluation), ("config", config)):
        (folder / f"{file}.json").write_text(json.dumps(content))
    (folder / "data.json").write_text(json.dumps({"real": "e" * 64, "mixed": None}))
    return folder


def make_runs(folder: Path) -> list[Path]:
    ce = [
        {"accuracy": 0.90, "ece": 0.04, "nll": 0.3},
        {"accuracy": 0.92, "ece": 0.06, "nll": 0.5},
    ]
    csm = [
        {"accuracy": 0.92, "ece": 0.02, "nll": 0.5},
        {"accuracy": 0.92, "ece": 0.05, "nll": 0.6},
    ]
    return [make_run(folder / "ce", "CE", ce), make_run(folder / "csm", "CSM", csm, head=True)]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return make_runs(tmp_path)


RANDOM = {"strategy": "random", "stability": None}
NOISES = [
    {"strategy": "select", "stability": 0.9, "scores": [0.5, 0.9, None]},
    {"strategy": "select", "stability": 0.7, "scores": [0.7, 0.1, None]},
    RANDOM,
]
NAMES = (NAUGHTY, "one", "two")


def make_mixed(folder: Path) -> str:
    """A root of one shard: three series of three alphas over two pairs of three classes."""
    alphas = [0.0, 0.5, 1.0]
    weights = [[0.0, 0.4, 1.0], [-0.1, 0.6, 0.9], [0.5, 0.2, 1.2]]
    classes = [[0, 1], [0, 2], [0, 1]]
    encoding = sorted(ENCODINGS)[-1]
    picture = encode_image(torch.zeros(4, 4, 3, dtype=torch.uint8).numpy(), encoding)
    samples = []
    for group, (pair, row) in enumerate(zip(classes, weights, strict=True)):
        labels = [[[pair[0], a], [pair[1], 1 - a]] for a in alphas]
        given = {"classes": pair, "alphas": alphas, "weights": row, "noise": NOISES[group]}
        given["names"] = [NAMES[k] for k in pair]
        record = handmade.series_of(handmade.record(group, **given, labels=labels))
        samples.append(GroupSample(record, [picture] * 3, encoding))
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
        found = dict(attrs)
        links = ("src", "srcset", "href", "data", "action")
        self.resources += [found[name] or "" for name in links if name in found]
        self.images_without_alt += tag == "img" and not found.get("alt")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


SHIFT_CELL = {"accuracy": 0.7, "ece": 0.12, "scaled_ece": 0.08, "nll": 1.0, "brier": 0.4}
SHIFT = {
    "bins": 10,
    "images": 1200,
    "mean": SHIFT_CELL,
    "corruptions": {"fog": {"1": SHIFT_CELL, "3": SHIFT_CELL, "mean": SHIFT_CELL}},
}
OOD_CELL = {"auroc": 0.91, "fpr95": 0.4, "entropy_auroc": 0.92, "entropy_fpr95": 0.38}


LIMITS = {key: [0.1, 0.2] for key in ("accuracy", "ece", "adaptive_ece", "nll", "brier")}
OOD = {NAUGHTY: {"images": 7, **OOD_CELL}, "mean": {**OOD_CELL, "fpr95": 0.45}}


def change_rows(run: Path, **parts: object) -> None:
    """Add parts to every row of a run's evaluation."""
    path = run / "evaluation.json"
    evaluation = json.loads(path.read_text())
    evaluation["rows"] = [{**row, **parts} for row in evaluation["rows"]]
    path.write_text(json.dumps(evaluation))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    path, runs, mixed = folder / "report.html", make_runs(folder), make_mixed(folder)
    change_rows(runs[0], vector=measures(ece=0.03), intervals=LIMITS, shift=SHIFT, ood=OOD)
    facts = {
        "seconds": {"build": 30.0},
        "splits": {"train": 7},
        "limits": ["Two seeds are few."],
        "models": {"generator": NAUGHTY},
    }
    agreement = {"agreed": 5, "images": 6, "share": 5 / 6}
    compared = [Compared("by choice", MixedDataset(mixed), agreement)]
    write_report(
        path,
        runs=runs,
        mixed=mixed,
        agreement=agreement,
        facts=facts,
        title="A & B",
        compared=compared,
    )
    return path.read_text()


def test_chosen_noise_is_shown_with_its_scores(source):
    text = " ".join(Page(source).text.split())
    # 0.9 and 0.7 were used; 0.5, 0.9, 0.7 and 0.1 were scored; 5 of 6 end points are as intended.
    assert "0.800 ± 0.141" in text
    assert "0.550 ± 0.342 (4)" in text
    assert "83.3 ± 14.5" in text


def test_noises_of_a_mixed_strategy_are_counted_once(tmp_path):
    whole = MixedDataset(make_mixed(tmp_path))
    (row,) = noise_rows([Compared("all", whole, {"share": 1, "images": 2})])
    assert (row.strategy, row.series, row.images) == ("random, select", 3, 9)
    whole.groups = [g.model_copy(update={"noise": RANDOM}) for g in whole.groups]
    (row,) = noise_rows([Compared("all", whole, {"share": 1, "images": 2})])
    assert (row.stability, row.candidates, row.agreement) == ("", "", "100.0 ± 19.2")


def test_page_is_well_formed_and_loads_nothing(source: str):
    page = Page(source)
    assert page.open == []
    assert "script" not in page.tags and "link" not in page.tags
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
    assert f"{MINUS}1.50 better 2/2" in text  # ECE of CSM against CE, in percent
    assert "+0.150 better 0/2" in text  # NLL
    assert "T = 2.00 ± 0.71" in text
    assert "83.3 % (5 of 6)" in text
    assert "Spearman(alpha, weight), median over series1.000" in text  # of rho 1, 1 and 0.5
    assert "series whose weight falls somewhere along alpha33.3 %" in text
    assert "together2 min 40 s" in text  # 30 s build, 65 s a run
    assert "Two seeds are few." in text


def test_headline_says_what_got_better_and_what_did_not(runs: list[Path]):
    first, second, scaled = (s.replace("\xa0", " ") for s in headlines(load_methods(runs)))
    assert first == (
        "Over 2 seeds, CSM against CE: better in mean ECE (5.00 ± 1.41 % → 3.50 ± 2.12 %, better "
        "on 2 of 2) and accuracy (91.00 ± 1.41 % → 92.00 ± 0.00 %, better on 1 of 2); not better "
        "in mean NLL (0.400 ± 0.141 → 0.550 ± 0.071, better on 0 of 2)."
    )
    assert second.startswith("Over 2 seeds, CSM + MaC-Cal against CE: ")
    assert scaled == (
        "After temperature scaling, mean ECE is 2.50 ± 0.71 % for CE, 1.75 ± 1.06 % for CSM and "
        "1.75 ± 1.06 % for CSM + MaC-Cal."
    )


def test_headline_of_a_method_that_is_worse_everywhere(tmp_path: Path):
    good, bad = {"accuracy": 0.9, "ece": 0.1, "nll": 0.2}, {"accuracy": 0.8, "ece": 0.2, "nll": 0.2}
    methods = load_methods(
        [make_run(tmp_path / "a", "CE", [good]), make_run(tmp_path / "b", "X", [bad])]
    )
    first = headlines(methods)[0].replace("\xa0", " ")
    assert first.startswith("Over 1 seed, X against CE: not better in mean ECE (10.00 % → 20.00 %")
    assert "better in" not in first.replace("not better in", "")


def test_best_mean_is_marked_and_equal_texts_share_the_mark(runs: list[Path]):
    by_method = comparison(load_methods(runs))
    ece = [[row.cells[1].best for row in rows] for rows in by_method]
    assert ece == [[False, False], [True, True], [True, True]]
    accuracy = [[row.cells[0].best for row in rows] for rows in by_method]
    assert accuracy == ece  # the same methods, though there more is better
    nll = [[row.cells[6].best for row in rows] for rows in by_method]
    assert nll == [[True, True], [False, False], [False, False]]


def test_a_method_alone_is_not_the_best(runs: list[Path]):
    (rows,) = comparison(load_methods(runs[:1]))
    assert not any(cell.best for row in rows for cell in row.cells)


def test_only_shared_seeds_are_paired(runs: list[Path], tmp_path: Path):
    one = make_run(tmp_path / "one", "one seed", [{"ece": 0.01}])
    baseline, *_, short = load_methods([*runs, one])
    got = paired(short, baseline, MEASURE["ece"], "plain")
    assert got is not None
    assert (got.change, got.better, got.shared) == (pytest.approx(0.01 - 0.04), 1, 1)
    assert differences([baseline, short])[0][0].cells[1].note == "better 1/1"


def test_without_shared_seeds_nothing_is_paired(runs: list[Path]):
    ce, csm, _ = load_methods(runs)
    late = type(csm)(csm.label, csm.stage, csm.run, ({**csm.rows[0], "seed": 9},))
    assert paired(late, ce, MEASURE["ece"], "plain") is None
    assert differences([ce, late])[0][0].cells[1].note == "no shared seed"
    assert "no shared seeds" in headlines([ce, late])[0]


def test_summary_table_by_hand(runs: list[Path]):
    got = summary_table(runs)
    assert [row["method"] for row in got] == ["CE", "CSM", "CSM + MaC-Cal"]
    assert got[0]["seeds"] == 2
    assert got[0]["plain"]["ece"] == pytest.approx({"mean": 0.05, "sd": 0.0002**0.5})
    assert got[0]["scaled"]["ece"]["mean"] == pytest.approx(0.025)
    json.dumps(got, allow_nan=False)


def test_print_table_fits_a_terminal_and_keeps_brackets(tmp_path: Path):
    run = make_run(tmp_path / "r", "[red]CE[/red]", [{"ece": 0.04}, {"ece": 0.06}])
    console = Console(width=80, file=io.StringIO(), record=True)
    print_table(summary_table([run]), console)
    text = console.export_text()
    assert "[red]CE[/red]" in text and "5.00±1.41" in text and "2.50±0.71" in text


def test_pooled_bins_hold_every_seed(runs: list[Path]):
    ce = load_methods(runs)[0]
    plain, scaled = pooled_bins(ce, "plain"), pooled_bins(ce, "scaled")
    assert int(plain.count.sum()) == int(scaled.count.sum()) == 6
    assert int(plain.count[-1]) == 2  # softmax(3, 0) = 0.953 in each of the two seeds
    assert int(scaled.count[-1]) == 0  # temperatures 1.5 and 2.5 leave 0.881 and 0.769


def test_measures_are_those_of_calibration_metrics():
    got = calibration_metrics(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    assert {measure.key for measure in MEASURES} <= got.as_dict().keys()


@pytest.mark.parametrize(
    ("value", "text"), [(0.0481, "4.81"), (0.0, "0.00"), (-1e-6, "0.00"), (-0.02, f"{MINUS}2.00")]
)
def test_percent_text(value: float, text: str):
    assert MEASURE["ece"].text(value) == text


def test_small_texts():
    assert [duration(s) for s in (4.23, 72.4, 3725)] == ["4.2 s", "1 min 12 s", "1 h 2 min"]
    assert [fixed(value) for value in (0.756, -0.001, -0.5)] == ["0.76", "0.00", f"{MINUS}0.50"]
    assert mean_and_sd([3.0]) == (3.0, None)
    assert MEASURE["nll"].text(0.0) == "0.000"


def test_sheet_ends_with_the_least_ordered_series(tmp_path: Path):
    mixed = MixedDataset(make_mixed(tmp_path))
    # As where some are left out.
    mixed.groups = [g.model_copy(update={"group": g.group + 40}) for g in mixed.groups]
    got = contact_sheet(mixed)
    assert [series.group for series in got] == [40, 41, 42]
    worst = "least ordered of all, \N{GREEK SMALL LETTER RHO} 0.50"
    assert [series.note == worst for series in got] == [False, False, True]
    assert (got[0].first, got[0].second) == (NAUGHTY, "one")
    assert [frame.first for frame in got[0].frames] == [0.0, 0.5, 1.0]
    assert [frame.weight for frame in got[0].frames] == pytest.approx([0.0, 0.4, 1.0])


def test_provenance_shows_only_settings_that_differ(runs: list[Path]):
    got = provenance(runs, {"command": "semix", "models": {"unet": {"width": 8}}})
    assert got.settings == [("mixed.weight", ["\N{EN DASH}", "1.0"])]
    assert got.other == {"further facts": {"command": "semix"}, "models": {"unet.width": "8"}}


def test_run_that_is_not_evaluated(tmp_path: Path):
    with pytest.raises(InputError, match=r"^run = .*/new: there is no such folder"):
        load_methods([tmp_path / "new"])
    with pytest.raises(InputError, match=r"^run = .*: holds no config\.json; name the folder of"):
        load_methods([tmp_path])


def test_evaluation_of_another_schema(runs: list[Path]):
    (runs[0] / "evaluation.json").write_text('{"schema": 1}')
    with pytest.raises(InputError, match="schema 1 where 2 is read"):
        summary_table(runs)


def test_runs_of_other_bins_are_refused(runs: list[Path]):
    change_rows(runs[1], bins=20)
    text = r"bins = \[15, 20\]: errors of different bins cannot be compared.*evaluation\.bins=15"
    with pytest.raises(InputError, match=text):
        summary_table(runs)


def test_what_else_was_measured_is_shown_where_it_was(source: str, runs: list[Path]):
    assert facets(load_methods(runs)) == []
    text = " ".join(Page(source).text.split())
    assert "CE + vector scaling50.00 ± 0.003.00 ± 0.00" in text
    assert "CE10.00 to 20.0010.00 to 20.00" in text
    assert "Mean over 1 corruptions x 2 severities of 1,200 images, ECE of 10 bins" in text
    assert "CE70.00 ± 0.0012.00 ± 0.008.00 ± 0.001.000 ± 0.0000.400 ± 0.000" in text
    assert f"CE, {NAUGHTY}91.00 ± 0.0040.00" in text
    assert "CE, mean over sets91.00 ± 0.0045.00" in text
    assert "isotonic" not in text


def test_an_evaluation_is_printed_with_intervals_shift_and_foreign_images(tmp_path: Path):
    run = make_run(tmp_path / "r", "[red]CE[/red]", [{"ece": 0.04}])
    others = {"vector": measures(ece=0.03), "isotonic": measures(ece=0.02)}
    intervals = {"intervals": {"ece": [0.031, 0.049]}, "posthoc_intervals": {"vector": {}}}
    change_rows(run, **others, **intervals, shift=SHIFT, ood={"mean": OOD_CELL})
    console = Console(width=100, file=io.StringIO(), record=True)
    print_evaluation(load_methods([run]), console)
    lines = console.export_text().splitlines()
    assert lines[0].strip() == "[red]CE[/red]"
    shown = {line.split("  ")[0].strip(): line.split()[-6:] for line in lines if line.strip()}
    half = ["50.00", "50.00", "0.500", "0.500"]  # AECE, CECE, NLL, Brier
    assert shown["as trained"] == ["50.00", "4.00", *half]
    assert shown["+ TS"] == ["50.00", "2.00", *half]
    assert shown["+ vector"] == ["50.00", "3.00", *half]
    assert shown["+ isotonic"] == ["50.00", "2.00", *half]
    text = " ".join(" ".join(lines).split())
    assert "[3.10, 4.90]" in text and "15 bins; 1 seed" in text
    assert "[red]CE[/red] 70.00 12.00 8.00 1.000 0.400" in text
    assert "mean over sets 91.00 40.00 92.00 38.00" in text


def test_a_table_on_a_narrow_screen_cuts_no_name_and_no_number(tmp_path: Path):
    name = "CSM + FeDLaS + MaC-Cal"
    run = make_run(tmp_path / "r", name, [{"ece": 0.04}, {"ece": 0.06}])
    console = Console(width=40, file=io.StringIO(), record=True)
    print_table(summary_table([run]), console)
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and "5.00±1.41" in text
    assert set(name.split()) <= set(text.split())


def test_logits_that_are_gone(runs: list[Path]):
    (runs[0] / "seed-1/logits-base.safetensors").unlink()
    with pytest.raises(InputError, match=r"logits = .*seed-1/logits-base\.safetensors: not there"):
        pooled_bins(load_methods(runs)[0], "plain")


def test_two_runs_of_one_name(runs: list[Path]):
    with pytest.raises(InputError, match="name = CE: two runs have this name"):
        load_methods([runs[0], runs[0]])


def test_no_runs():
    with pytest.raises(InputError, match="at least one finished run"):
        load_methods([])
