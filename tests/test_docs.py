"""The written pages: links lead somewhere, and the examples of CONTRIBUTING.md run."""

import inspect
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
SECTIONS = [
    section
    for section in re.split(r"^## ", STUDY_PAGE, flags=re.MULTILINE)
    if (folder := re.search(r"\[([\w-]+)/\]", section))
    and (STUDIES / folder[1] / "values.csv").exists()
]


@pytest.mark.parametrize("section", SECTIONS, ids=[text.split("\n")[0] for text in SECTIONS])
def test_every_figure_of_a_study_is_in_its_tables(section):
    folder = re.search(r"\[([\w-]+)/\]", section)[1]
    known = set(NUMBER.findall((STUDIES / folder / "study.md").read_text()))
    config = (ROOT / "configs" / f"study-{folder}.yaml").read_text()
    prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    unknown = set(NUMBER.findall(prose)) - known - set(NUMBER.findall(config))
    assert unknown == set()


NUMBER = re.compile(r"\d+\.\d+")


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
