"""The written pages: links lead somewhere, and the examples of CONTRIBUTING.md run."""

import inspect
import json
import re
from pathlib import Path

import pandas
import pytest

from calib.losses import REAL_LOSSES
from pipeline.annotate import RULES

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
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


STUDIES = ROOT / "docs" / "studies"
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
