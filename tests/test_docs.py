"""The written pages: links lead somewhere, and the examples of CONTRIBUTING.md run."""

import inspect
import re
from pathlib import Path

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
