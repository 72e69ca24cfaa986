"""The documentation: what it names exists, its values are recorded, its examples run."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jupytext
import pandas
import pytest
import yaml
from typer.main import get_command

from benchmarks.peer_reading import READERS
from semix.calib.config import HEADS
from semix.calib.config.component import ComponentConfig
from semix.calib.config.loss import LOSSES, MixedLossName
from semix.calib.config.method import METHODS
from semix.calib.config.model import MODELS
from semix.calib.losses import build_loss
from semix.calib.methods import build_method
from semix.calib.shown_measures import ALL_MEASURES
from semix.calib.study import StudyConfig, cells_of, check_cells
from semix.calib.tables import OVERVIEW
from semix.data.errors import InputError
from semix.data.settings import load_settings
from semix.flows.cli import app
from semix.flows.configs import reference
from semix.pipeline.annotate import RULES
from semix.pipeline.config import Family

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
STUDIES = ROOT / "docs" / "studies"
TRAINING = ROOT / "docs" / "training.md"
VERBS = ("ls", "logs", "cancel", "inspect", "watch", "retry")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in headings(target), f"{page.name}: {link}"


# Without the changelog, which also names what was removed, and the tables that studies write.
CURRENT = [
    *(page for page in PAGES if page.name != "CHANGELOG.md" and not page.name.startswith("study")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *sorted(path for path in (ROOT / "docker").rglob("*") if path.suffix in (".yaml", ".env")),
    ROOT / "docker" / "Dockerfile",
    ROOT / "prefect.yaml",
]
on_each_page = pytest.mark.parametrize(
    "page", CURRENT, ids=lambda page: page.relative_to(ROOT).as_posix()
)
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def spans(page: Path) -> list[str]:
    """The texts in backticks, their line breaks replaced by spaces."""
    prose = BLOCK.sub("", page.read_text()).replace("\n# ", " ")
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def lines_of_code(page: Path) -> list[str]:
    """Lines of code blocks, and texts in backticks; every line of a file that is no page."""
    text = page.read_text()
    blocks = [block for _, block in BLOCK.findall(text)] if page.suffix == ".md" else [text]
    return [*(line for block in blocks for line in block.splitlines()), *spans(page)]


OPTIONS = {
    name: {"--help"}.union(*(parameter.opts for parameter in command.params))
    for name, command in get_command(app).commands.items()
}
CALL = re.compile(r"^(?:.*(?:bin/|`|exec |worker )| *)semix ([a-z][a-z-]*)\b([^`#]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@on_each_page
def test_every_command_and_option_exists(page):
    lines = lines_of_code(page)
    for name, arguments in (call for line in lines for call in CALL.findall(line)):
        assert set(FLAG.findall(arguments)) <= OPTIONS.get(name, set()), f"semix {name}{arguments}"
        assert name in OPTIONS, f"semix {name}"
    texts = [path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")]
    texts += (block for _, block in BLOCK.findall(page.read_text()))  # with Prefect's and Slurm's
    flags = set(FLAG.findall("\n".join(texts))).union(*OPTIONS.values())
    assert {flag for span in spans(page) for flag in FLAG.findall(span) if span[0] == "-"} <= flags
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {line.split()[1] for line in lines if re.match("make [a-z]", line)} <= set(targets)


SETTINGS = [row for command in ("build", "train", "study", "loop") for row in reference(command)]
OF_A_STUDY = re.compile(r"^(base|build|train|(datasets|methods)\.[\w-]+\.overrides)\.")


def is_setting(name: str, value: object = None) -> bool:
    """Whether a config has a setting whose dotted name ends with `name` and that takes `value`."""
    name = OF_A_STUDY.sub("", name)
    for row in SETTINGS:
        path, kind = f".{row['key']}", row["type"]
        if kind == "mapping" and f".{name}.".rpartition(f".{path.rpartition('.')[2]}.")[1]:
            return True
        choices = re.findall(r"\w+", kind) if kind.startswith("one of ") else [value]
        if path.endswith(f".{name}") and (not isinstance(value, str) or value in choices):
            return True
    return False


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted names of settings with their values."""
    for key, value in values.items():
        is_section = isinstance(value, dict)
        yield from leaves(value, f"{prefix}{key}.") if is_section else [(f"{prefix}{key}", value)]


@on_each_page
def test_every_setting_exists(page):
    text, sections = page.read_text(), {row["key"].partition(".")[0] for row in SETTINGS}
    last_words = {row["key"].rpartition(".")[2] for row in SETTINGS}
    yaml_blocks = [yaml.safe_load(block) for kind, block in BLOCK.findall(text) if kind == "yaml"]
    for span in spans(page):
        name, _, value = span.partition(": ")
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name):
            if name.partition(".")[0] in sections and not OF_A_FILE.search(name):
                assert is_setting(name, value or None), span
        elif value and name in last_words:
            yaml_blocks.append(yaml.safe_load(span))
    for name, value in (leaf for values in yaml_blocks for leaf in leaves(values)):
        assert is_setting(name, value), f"{name}: {value}"
    for name in re.findall(r"--set '?([\w.-]+)=", text):
        assert name == "section.key" or is_setting(name), name


FOLDERS = ["benchmarks", "calib", "configs", "data", "docker", "docs", "flows", "pipeline", "tests"]
PATH = re.compile(rf"(?<![\w/.~-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*]")
OF_A_FILE = re.compile(r"\.(jsonl?|csv|gz|html|log|md|png|py|tex|ya?ml|toml|env|lock)$")


@on_each_page
def test_every_file_exists(page):
    for path in PATH.findall(page.read_text()):
        assert path == "docker/.env" or any(ROOT.glob(path.replace("NAME", "*"))), path
    for span in spans(page):
        if re.fullmatch(r"[\w*.-]+\.(py|md|ya?ml|toml|lock)", span):
            assert any(any(ROOT.glob(f"{folder}/**/{span}")) for folder in (*FOLDERS, ".")), span


def in_row(page: Path, start: str) -> set[str]:
    """Names in backticks in a row's second cell, and all between `resnet8` to `resnet110`."""
    (cell,) = re.findall(rf"^\| {start}[^|]*\| (.*?) \|", page.read_text(), re.MULTILINE)
    cell = re.sub(r"\([^()]*\)", "", cell).partition(";")[0]
    names = set(re.findall(r"`(\w+)`", cell))
    for stem, low, high in re.findall(r"`([a-z]+)(\d+)` to `[a-z]+(\d+)`", cell):
        depths = range(int(low), int(high) + 1)
        names |= {name for name in MODELS if name in [f"{stem}{depth}" for depth in depths]}
    return names


ROWS = {
    "`loss`": set(LOSSES),
    "`mixed.loss`": set(get_args(MixedLossName)),
    "`method`": set(METHODS),
    "`head`": set(HEADS),
    "`model`": {name.removesuffix("_tiny") for name in MODELS},
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_a_table_of_parts_has_all_of_them(page, row):
    assert in_row(ROOT / page, row) == ROWS[row]


def test_the_table_of_families_has_all_of_them():
    readme = (ROOT / "README.md").read_text()
    (table,) = re.findall(r"^\| `generator.family`.*\n\|[-|]+\n((?:\|.*\n)+)", readme, re.M)
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(get_args(Family))


SAYS_UNDER = re.compile(r"\[?([\w./]+\.md)(?:\]\([^)]*\))? says under (\w+)")


def test_what_a_page_is_said_to_have_under_a_heading_it_has():
    files = [*PAGES, *(ROOT / "pipeline").rglob("*.py"), *(ROOT / "calib").rglob("*.py")]
    references = [(file, *pair) for file in files for pair in SAYS_UNDER.findall(file.read_text())]
    assert len(references) > 2
    for file, name, title in references:
        target = file.parent / name if file.suffix == ".md" else ROOT / name
        assert title.lower() in headings(target), f"{file.name}: {name} has no {title}"


PREFECT = re.compile(r"\bprefect (?:--no-prompt )?([a-z-]+ [a-z]+)\b")
COMMANDS = {words for page in PAGES for words in PREFECT.findall(page.read_text())}


@pytest.mark.process
@pytest.mark.parametrize("words", sorted(COMMANDS & {f"flow-run {verb}" for verb in VERBS}))
def test_prefect_has_the_commands_of_runs_that_pages_name(words):
    command = [sys.executable, "-m", "prefect", *words.split(), "--help"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_tables_of_the_pages_name_columns_as_the_program_does():
    header = f"| | {' | '.join(column.title for column in OVERVIEW)} |"
    text = "".join(page.read_text() for page in (ROOT / "README.md", STUDIES / "README.md"))
    assert [line for line in text.splitlines() if line.endswith("NLL + TS |")] == 3 * [header]
    (measures,) = sections(ROOT / "docs" / "training.md", "Measures").values()
    words = " ".join(measures.split())
    assert [m.short for m in ALL_MEASURES if m.short not in words and m.title not in words] == []


def test_the_example_of_a_grid_is_a_study_with_the_rows_that_the_page_names():
    (text,) = re.findall(r"```yaml\n(name: Which rate.*?)```", TRAINING.read_text(), re.DOTALL)
    study = load_settings(StudyConfig, yaml.safe_load(text))
    cells = cells_of(study)
    check_cells(cells)
    rows = {cell.config.name for cell in cells}
    assert len(rows) == 1 + 3 * 2 and "MaC-Cal (lr 0.1, half)" in rows


STUDY_PAGE = (STUDIES / "README.md").read_text()
NUMBER = re.compile(r"\d+\.\d+")
RECORD = re.compile(r"([\w-]+)/(study|loop)\.md")  # as a link names the table of a study or loop


def sections(page: Path, *titles: str) -> dict[str, str]:
    """Text below each heading of the second level, without code."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    texts = {text.split("\n")[0]: text for text in re.split(r"^## ", prose, flags=re.MULTILINE)}
    return {title: texts[title] for title in titles or texts}


CLAIMS = {
    **sections(STUDIES / "README.md"),
    **sections(ROOT / "README.md", "What the methods did"),
    **{
        f"methods/{page.name}": sections(page, "What was measured here")["What was measured here"]
        for page in sorted((ROOT / "docs" / "methods").glob("*.md"))
    },
    **{line[:60]: line for line in sections(STUDIES / "which.md")["By need"].splitlines()},
    **{
        line[:60]: line.split("|")[3]  # the column of what was measured here
        for line in (STUDIES / "claims.md").read_text().splitlines()
        if line.startswith("| ")
    },
}


@pytest.mark.parametrize("text", CLAIMS.values(), ids=CLAIMS)
def test_every_figure_of_a_study_is_in_the_records_that_the_text_names(text):
    recorded: set[str] = set()
    for folder, kind in set(RECORD.findall(text)):
        recorded |= set(NUMBER.findall((STUDIES / folder / f"{kind}.md").read_text()))
        name = folder.removesuffix("-further")  # later rows of the same study
        config = f"study-{name}.yaml" if kind == "study" else f"{name}.yaml"
        recorded |= set(NUMBER.findall((ROOT / "configs" / config).read_text()))
        assert (STUDIES / folder / "values.csv").is_file()
    assert set(NUMBER.findall(text)) - recorded == set()


def test_the_table_of_enhancers_is_that_of_the_record():
    record = json.loads((STUDIES / "enhancers" / "enhancers.json").read_text())["settings"]
    (text,) = sections(ROOT / "docs" / "noise.md", "Enhancers").values()
    rows = re.findall(r"^\| (\w[^|]+) \| (\d[^|]*) \| (.+) \|$", text, re.MULTILINE)
    assert [label for label, _, _ in rows] == list(record)
    for label, calls, figures in rows:
        measured = record[label]
        end_points, nearest = (measured[k]["share"] for k in ("end_points", "nearest_prototype"))
        correlation = measured["correlation"]
        percents = [
            f"{100 * each:.1f}" for each in (end_points, nearest, correlation["not_monotone"])
        ]
        expected = [*percents[:2], f"{correlation['mean']:.3f}", percents[2]]
        assert (int(calls), figures.split(" | ")) == (measured["network_rows_per_image"], expected)


SPEED = {  # start of a row in the README: benchmark and its value
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
    for row, shown, percent in rows:
        ((name, bar),) = [benchmark for start, benchmark in SPEED.items() if row.startswith(start)]
        value = results[name]["bars"][bar]["value"] * (100 if percent else 1)
        digits = len(shown.partition(".")[2])
        assert f"{value:.{digits}f}" == shown, row


def values_in(record: Any) -> Iterator[float]:
    """The numbers in a record, without long lists of single timings."""
    if isinstance(record, dict):
        record = list(record.values())
    elif isinstance(record, list) and len(record) > 4:
        return
    if isinstance(record, list):
        for item in record:
            yield from values_in(item)
    elif isinstance(record, int | float):
        yield record


def test_every_figure_of_the_benchmarks_is_in_the_newest_record_of_one():
    newest: dict[str, Any] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-cpu*.json")):
        newest |= json.loads(path.read_text())["results"]
    recorded = list(values_in(newest))
    (text,) = sections(ROOT / "benchmarks" / "README.md", "Benchmarks").values()
    cells = re.findall(r"^\| .+? \| ([^|]*\d[^|]*) \|[^|]*\|$", text, re.MULTILINE)
    assert len(cells) > 30
    for number, percent in re.findall(r"([\d.]*\d)( %)?", " ".join(cells).replace("by 5 %", "")):
        digits, unit = len(number.partition(".")[2]), 100 if percent else 1
        assert any(f"{value * unit:.{digits}f}" == number for value in recorded), number


def test_every_figure_of_the_readers_is_in_their_newest_record():
    records = sorted((ROOT / "benchmarks" / "results").glob("*-cpu.json"), reverse=True)
    results = [json.loads(path.read_text())["results"] for path in records]
    figures = next(each["C16"]["figures"] for each in results if "C16" in each)
    recorded = list(values_in(figures))
    (text,) = sections(ROOT / "benchmarks" / "README.md", "Reading beside peers").values()
    rows = re.findall(r"^\| [^|]+ \| (\d.*) \|$", text, re.MULTILINE)
    assert len(rows) == len(READERS)
    for number in re.findall(r"[\d.]+", " ".join(rows).replace(",", "").replace("|", " ")):
        digits = len(number.partition(".")[2])
        assert any(f"{value:.{digits}f}" == number for value in recorded), number


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
    "loss": (LOSSES, build_loss),
    "method": (METHODS, build_method),
}
RANGE = re.compile(r"(whole, )?(above )?(`?[\w.]+`?)(?: to (below )?(`?[\w.]+`?)| or (more|less))?")


def parameter_rows(what: str) -> list[list[str]]:
    """Cells per row of the table of a loss's or method's parameters.

    A row has name, parameter, default, range, ..., source.
    """
    (text,) = sections(ROOT / "docs" / "training.md", "Parameters").values()
    (table,) = re.findall(rf"^\| {what} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [line.strip("|\n ").replace("`", "") for line in table.splitlines()]
    return [[cell.strip() for cell in f"{line} ".split(" | ")] for line in lines]


@pytest.mark.parametrize("what", BUILDERS)
def test_every_parameter_of_a_part_has_its_default_and_its_source(what):
    kinds: dict[str, type[ComponentConfig]] = BUILDERS[what][0]
    documented: dict[str, dict[str, str]] = {}
    for entry, name, default, *_, source in parameter_rows(what):
        is_new = entry not in documented
        assert not is_new or source or entry in ("ce", "plain"), entry
        documented.setdefault(entry, {}).update({name: default} if name != "none" else {})
    assert list(documented) == list(kinds)
    for entry, names in documented.items():
        fields = kinds[entry].model_fields
        assert {*names, "name"} == set(fields)
        for name, default in names.items():
            if name != "num_samples":
                assert yaml.safe_load(default.replace("none", "null")) == fields[name].default


def inside_and_outside(text: str) -> tuple[list[object], list[object]]:
    """Values that a range allows, among them its ends, and some that it does not."""
    if "," in text and not text.startswith("whole"):
        choices = [yaml.safe_load(word) for word in text.split(", ")]
        return choices, ["other"]
    integer, above, low, below, high, open_end = RANGE.fullmatch(text).groups()
    step = 1 if integer else 0.25
    if open_end == "less":
        return [float(low), float(low) - 1], [float(low) + step]
    low_end = {"gamma_min": -2.0}.get(low) if low == "gamma_min" else yaml.safe_load(low)
    inside, outside = [low_end + step], [low_end - step]
    (outside if above else inside).append(low_end)
    if high:
        high_end = {"gamma_max": 20.0}.get(high) if high == "gamma_max" else float(high)
        (outside if below else inside).append(high_end)
        outside.append(high_end + step)
    return inside, outside + ([1.5] if integer else [])


RANGES = [
    pytest.param(what, part, name, limits, id=f"{part}.{name}")
    for what in BUILDERS
    for part, name, _, limits, *_ in parameter_rows(what)
    if name != "none"
]


@pytest.mark.parametrize(("what", "part", "name", "limits"), RANGES)
def test_a_parameter_takes_the_documented_range_and_no_more(what, part, name, limits):
    build = BUILDERS[what][1]
    fixed: dict[str, float] = {"num_samples": 9} if (part, name) != ("crl", "num_samples") else {}
    fixed = fixed if part == "crl" else {}
    if name == "gamma_max":  # gamma and switch must stay below it
        fixed = {"gamma": 0.0, "switch": 0.0}
    inside, outside = inside_and_outside(limits)
    for value in inside:
        build(part, 3, **fixed, **{name: value})
    for value in outside:
        with pytest.raises(InputError, match=rf"^{what}(\.{name} = |: `{name}` is )"):
            build(part, 3, **fixed, **{name: value})


EXAMPLES = re.findall(
    r"^## (A new [^\n]+)\n.*?```python\n(.*?)```",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_for_contributors_runs_its_own_test(title, code, request):
    assert code.count("\n") < 60
    names: dict[str, object] = {"__name__": "example"}
    tables: list[dict] = [RULES]
    before = [dict(table) for table in tables]
    try:
        exec(compile(code, title, "exec"), names)
        tests = [value for name, value in names.items() if name.startswith("test_")]
        assert tests
        for test in tests:
            fixtures = inspect.signature(test).parameters
            test(**{name: request.getfixturevalue(name) for name in fixtures})
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def test_there_is_an_example_for_each_kind():
    assert len(EXAMPLES) == 3


@pytest.mark.process
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--nitpicky"]
    command += ["--quiet", "-c", "docs", ".", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    entry = (tmp_path / "index.html").read_text()
    home = tmp_path / re.search(r"url=([^\"]+)", entry)[1]
    page = home.read_text()
    assert "Classifiers are overconfident" in page
    for link in re.findall(r'href="([^"#?]+)', page):
        assert link.startswith("https:") or (home.parent / link).exists(), link
    loaded = re.findall(r'(?:src|(?<=stylesheet" )href)="(https?:[^"]+)', page)
    assert loaded == []  # from elsewhere
    assert "load_state_dict" in (tmp_path / "docs" / "reference.html").read_text()
    assert "<math" in (tmp_path / "docs" / "methods" / "csm.html").read_text()


def test_the_menu_of_the_site_has_every_page():
    menu = (ROOT / "docs" / "conf.py").read_text()
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix("").as_posix()
        assert f'"{name}"' in menu or name == "docs/index" or page.parent.parent == STUDIES, name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tutorial_runs(tmp_path):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for kind, block in BLOCK.findall(text):
        command = [sys.executable, "-c", block] if kind == "python" else ["bash", "-ec", block]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, f"{block}\n{ended.stdout}{ended.stderr}"
    for name in ("sheet.png", "audit/audit.html", "report.html", "predicted.csv"):
        assert (tmp_path / name).stat().st_size > 0
    assert "CSM" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_notebook_runs(tmp_path, monkeypatch):
    notebook = jupytext.read(ROOT / "docs" / "notebook.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
    assert names["best"] in range(10) and len(names["values"]) > 0
