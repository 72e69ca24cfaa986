"""The written pages: links lead somewhere, and the examples of CONTRIBUTING.md run."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import yaml
from semix.calib.config import LOSSES, METHODS
from semix.calib.losses import REAL_LOSSES, build_loss
from semix.calib.methods import METHODS as METHOD_CLASSES
from semix.calib.methods import build_method
from semix.calib.results import EVERY_MEASURE
from semix.calib.study import StudyConfig, cells_of, check_cells
from semix.calib.tables import OVERVIEW
from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.pipeline.annotate import RULES

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
VERBS = ("ls", "logs", "cancel", "inspect", "watch", "retry")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def headings(page: Path) -> set[str]:
    """Anchors that a page's headings have where Markdown is shown."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in headings(target), f"{page.name}: {link}"


SAYS_UNDER = re.compile(r"\[?([\w./]+\.md)(?:\]\([^)]*\))? says under (\w+)")


def test_what_a_page_is_said_to_have_under_a_heading_it_has():
    sources = [*PAGES, *(ROOT / "pipeline").rglob("*.py"), *(ROOT / "calib").rglob("*.py")]
    told = [(file, *found) for file in sources for found in SAYS_UNDER.findall(file.read_text())]
    assert len(told) > 2
    for file, name, title in told:
        beside = file.parent / name if file.suffix == ".md" else ROOT / name
        assert title.lower() in headings(beside), f"{file.name}: {name} has no {title}"


PREFECT = re.compile(r"\bprefect (?:--no-prompt )?([a-z-]+ [a-z]+)\b")
COMMANDS = {words for page in PAGES for words in PREFECT.findall(page.read_text())}


@pytest.mark.process
@pytest.mark.parametrize("words", sorted(COMMANDS & {f"flow-run {verb}" for verb in VERBS}))
def test_prefect_has_the_commands_of_runs_that_pages_name(words):
    command = [sys.executable, "-m", "prefect", *words.split(), "--help"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_tables_of_the_pages_name_columns_as_the_program_does():
    wanted = f"| | {' | '.join(column.title for column in OVERVIEW)} |"
    text = "".join(page.read_text() for page in (ROOT / "README.md", STUDIES / "README.md"))
    assert [line for line in text.splitlines() if line.endswith("NLL + TS |")] == 3 * [wanted]
    (measures,) = sections(ROOT / "docs" / "training.md", "Measures").values()
    words = " ".join(measures.split())
    assert [m.short for m in EVERY_MEASURE if m.short not in words and m.title not in words] == []


def test_the_worked_grid_is_a_study_with_the_rows_that_are_told():
    (text,) = re.findall(r"```yaml\n(name: Which rate.*?)```", TRAINING.read_text(), re.DOTALL)
    study = load_settings(StudyConfig, yaml.safe_load(text))
    cells = cells_of(study)
    check_cells(cells)
    rows = {cell.config.name for cell in cells}
    assert len(rows) == 1 + 3 * 2 and "MaC-Cal (lr 0.1, half)" in rows


STUDIES = ROOT / "docs" / "studies"
TRAINING = ROOT / "docs" / "training.md"
STUDY_PAGE = (STUDIES / "README.md").read_text()
NUMBER = re.compile(r"\d+\.\d+")
RECORD = re.compile(r"([\w-]+)/study\.md")  # as a link names a study's table


def sections(page: Path, *titles: str) -> dict[str, str]:
    """Text below each heading of the second level, without code."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = {text.split("\n")[0]: text for text in re.split(r"^## ", prose, flags=re.MULTILINE)}
    return {title: found[title] for title in titles or found}


TOLD = {
    **sections(STUDIES / "README.md"),
    **sections(ROOT / "README.md", "What the methods did"),
    **{line[:60]: line for line in sections(STUDIES / "which.md")["By need"].splitlines()},
}


@pytest.mark.parametrize("text", TOLD.values(), ids=TOLD)
def test_every_figure_that_is_told_is_in_the_records_it_names(text):
    known: set[str] = set()
    for folder in set(RECORD.findall(text)):
        known |= set(NUMBER.findall((STUDIES / folder / "study.md").read_text()))
        known |= set(NUMBER.findall((ROOT / "configs" / f"study-{folder}.yaml").read_text()))
        assert (STUDIES / folder / "values.csv").is_file()
    assert set(NUMBER.findall(text)) - known == set()


SPEED = {  # a row of the README, the benchmark and its figure
    "series in batches": ("C1", "ratio to one image a call"),
    "encoding and writing": ("C4", "ratio to PNG in the loop"),
    "relabelling 4,000 images": ("C3", "ratio to one at a time"),
    "epochs at 32 px": ("C5", "the same in whole batches"),
    "a training step": ("C13", "step over the bare loop"),
    "100 shards of 30 s": ("C10", "overhead of 100 shards of 30 s, all of it"),
}


def test_every_speed_in_the_readme_is_in_the_record_it_names():
    (text,) = sections(ROOT / "README.md", "What was measured").values()
    (record,) = re.findall(r"benchmarks/results/[\w-]+\.json", text)
    results = json.loads((ROOT / record).read_text())["results"]
    rows = re.findall(r"^\| (.+?) \| ([\d.]+)( %)?[^|]*\|$", text, re.MULTILINE)
    assert len(rows) == len(SPEED)
    for row, told, percent in rows:
        (found,) = [where for start, where in SPEED.items() if row.startswith(start)]
        value = results[found[0]]["bars"][found[1]]["value"] * (100 if percent else 1)
        digits = len(told.partition(".")[2])
        assert f"{value:.{digits}f}" == told, row


def test_the_lines_that_redo_an_interval_give_that_of_the_table(monkeypatch):
    monkeypatch.chdir(ROOT)
    (lines,) = re.findall(r"```python\n(.*?)```", STUDY_PAGE, re.DOTALL)
    names: dict = {}
    exec(compile(lines, "docs/studies/README.md", "exec"), names)
    folder, dataset = re.search(r"studies/([\w-]+)/", lines)[1], "not-saturated"
    rows = pandas.read_csv(STUDIES / folder / "study.csv").set_index(["dataset", "method"])
    row = rows.loc[dataset, "MaC-Cal, chosen"]
    assert [names["low"], names["high"]] == pytest.approx(
        [row["ece_low"], row["ece_high"]], abs=1e-6
    )
    assert names["changes"].mean() == pytest.approx(row["ece_change"], abs=1e-6)


BUILDERS = {
    "loss": (LOSSES, REAL_LOSSES, build_loss),
    "method": (METHODS, METHOD_CLASSES, build_method),
}
RANGE = re.compile(r"(whole, )?(above )?(`?[\w.]+`?)(?: to (below )?(`?[\w.]+`?)| or (more|less))?")


def parameter_rows(what: str) -> list[list[str]]:
    """Cells of each row of a table of parameters: part, parameter, default, range, ..., source."""
    (text,) = sections(ROOT / "docs" / "training.md", "Parameters").values()
    (table,) = re.findall(rf"^\| {what} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [line.strip("|\n ").replace("`", "") for line in table.splitlines()]
    return [[cell.strip() for cell in f"{line} ".split(" | ")] for line in lines]


@pytest.mark.parametrize("what", BUILDERS)
def test_every_parameter_of_a_part_is_told_with_its_default_and_its_source(what):
    known, classes, _ = BUILDERS[what]
    told: dict[str, dict[str, str]] = {}
    for part, name, default, *_, source in parameter_rows(what):
        first = part not in told
        assert not first or source or part in ("ce", "plain"), part
        told.setdefault(part, {}).update({name: default} if name != "none" else {})
    assert {part: list(names) for part, names in told.items()} == {
        part: list(names) for part, names in known.items()
    }
    for part, names in told.items():
        signature = inspect.signature(classes[part]).parameters
        for name, default in names.items():
            if name != "num_samples":
                assert yaml.safe_load(default.replace("none", "null")) == signature[name].default


def inside_and_outside(text: str) -> tuple[list[object], list[object]]:
    """Values that a range takes, among them its ends, and some that it does not."""
    if "," in text and not text.startswith("whole"):
        choices = [yaml.safe_load(word) for word in text.split(", ")]
        return choices, ["other"]
    whole, above, low, below, high, way = RANGE.fullmatch(text).groups()
    step = 1 if whole else 0.25
    if way == "less":
        return [float(low), float(low) - 1], [float(low) + step]
    low_end = {"gamma_min": -2.0}.get(low) if low == "gamma_min" else yaml.safe_load(low)
    inside, outside = [low_end + step], [low_end - step]
    (outside if above else inside).append(low_end)
    if high:
        high_end = {"gamma_max": 20.0}.get(high) if high == "gamma_max" else float(high)
        (outside if below else inside).append(high_end)
        outside.append(high_end + step)
    return inside, outside + ([1.5] if whole else [])


RANGES = [
    pytest.param(what, part, name, told, id=f"{part}.{name}")
    for what in BUILDERS
    for part, name, _, told, *_ in parameter_rows(what)
    if name != "none"
]


@pytest.mark.parametrize(("what", "part", "name", "told"), RANGES)
def test_a_parameter_takes_the_range_that_is_told_and_no_more(what, part, name, told):
    build = BUILDERS[what][2]
    beside: dict[str, float] = {"num_samples": 9} if (part, name) != ("crl", "num_samples") else {}
    beside = beside if part == "crl" else {}
    if name == "gamma_max":  # which the other two stay below
        beside = {"gamma": 0.0, "switch": 0.0}
    inside, outside = inside_and_outside(told)
    for value in inside:
        build(part, 3, **beside, **{name: value})
    for value in outside:
        with pytest.raises(InputError, match=rf"^{what}\.{name} = "):
            build(part, 3, **beside, **{name: value})


EXAMPLES = re.findall(
    r"^## (A new [^\n]+)\n.*?```python\n(.*?)```",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_for_contributors_runs_its_own_test(title, code, request):
    assert code.count("\n") < 60
    names: dict[str, object] = {"__name__": "example"}
    tables: list[dict] = [REAL_LOSSES, RULES]
    before = [dict(table) for table in tables]
    try:
        exec(compile(code, title, "exec"), names)
        tests = [value for name, value in names.items() if name.startswith("test_")]
        assert tests
        for test in tests:
            wanted = inspect.signature(test).parameters
            test(**{name: request.getfixturevalue(name) for name in wanted})
    finally:
        for table, was in zip(tables, before, strict=True):
            table.clear()
            table.update(was)


def test_there_is_an_example_for_each_kind():
    assert len(EXAMPLES) == 3
