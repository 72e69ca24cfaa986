"""The hostile list, part two: names of methods and classes, and reasons, in output and tables."""

import csv
import io
import logging
import unicodedata

import pytest
from pandas import DataFrame
from rich.console import Console

from semix.calib.results import load_methods
from semix.calib.tables import csv_text, overview, print_table
from semix.data.errors import InputError
from semix.data.formats import Failure
from semix.data.printable import print_line
from semix.data.root import Root
from semix.flows.terminal import emit_facts, print_error, set_up_logging
from tests.calib.measured import make_run
from tests.command import semix
from tests.handmade import root_of, sample

pytestmark = pytest.mark.timeout(60)

NAMES: dict[str, str] = {
    "an escape sequence that clears the screen": "a\x1b[2Jb",
    "a link to another place than it shows": "\x1b]8;;http://evil.example\x07here\x1b]8;;\x07",
    "a title for the window": "\x1b]0;gone\x9c",
    "a sequence in one C1 character": "a\x9b31mb",
    "a carriage return": "good\rbad",
    "backspaces": "bad\x08\x08\x08ok ",
    "a null": "a\0b",
    "a bell": "a\x07b",
    "a form feed": "a\x0cb",
    "an override from right to left": "cat\u202egnp.exe",
    "an isolate from right to left": "a\u2067b\u2069c",
    "a mark from right to left": "a\u200fb",
    "a space of no width": "a\u200bb",
    "a byte order mark": "\ufeffa",
    "letters that nobody sees": "a\U000e0041\U000e0042",
    "a separator of lines": "a\u2028error: all is lost",
    "a line that looks like an error": "a\nerror: all is lost",
    "a line that looks like a log's": "a\n12:00:00 warning: all is lost",
    "markup of rich": "[red]a[/red][link=http://evil.example]b[/link]",
    "a closing tag of rich": "a[/]b[/bold]",
}


def assert_harmless(text: str) -> None:
    controls = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert not controls, text
    forged = [line for line in text.splitlines() if line.startswith(("error: all", "12:00:00"))]
    assert forged == [], text


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_hostile_name_steers_no_terminal(name, tmp_path, capsys):
    run = make_run(tmp_path / "run", name, [{}])
    print_table(overview(load_methods([run])), Console(width=200))
    print_error(str(InputError(name, name, "choose another")))
    emit_facts({"lineage": name}, as_json=False)
    print_line(f"{name} seed 0: done already")
    set_up_logging()
    logging.getLogger("semix.train").warning("%s: failed", name)
    output = capsys.readouterr()
    assert_harmless(output.out + output.err)
    assert "lost" not in name or output.out.count("lost") >= 3  # it is shown, and does nothing


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_hostile_class_or_reason_of_a_root_steers_no_terminal(name, tmp_path):
    names = [name, "dog"]
    root = root_of(tmp_path / "root", [sample(0, names=names)], names)
    failure = Failure(shard=0, attempt=1, error=name, message=name, time=0.0)
    (tmp_path / "root" / "shards" / "0000" / "0000000.json").rename(tmp_path / "kept")
    Root(root.url).record_failure(failure)
    outputs = [semix("failures", root.url), semix("status", root.url)]
    (tmp_path / "kept").rename(tmp_path / "root" / "shards" / "0000" / "0000000.json")
    outputs.append(semix("show", root.url, "0"))
    for status, out, err in outputs:
        assert status == 0 or "not your input" not in err
        assert_harmless(out + err)


FORMULAS = {
    "a program": "=cmd|'/c calc'!A1",
    "a sum": "+1+1",
    "a difference": "-2+3",
    "a function of old": "@SUM(A1)",
    "behind a tab": "\t=1+1",
    "behind a carriage return": "\r=1+1",
    "behind a line break": "\n=1+1",
    "a wide sign of equality": "\uff1d1+1",
}


@pytest.mark.parametrize("text", FORMULAS.values(), ids=FORMULAS)
def test_a_name_is_no_formula_of_a_spreadsheet(text):
    frame = DataFrame({"method": [text, "CE"], "ece": [-0.5, None], text: [1, -2]})
    for text_of_table in (csv_text(frame), csv_text(frame.astype(object))):
        header, first_row, second_row = csv.reader(io.StringIO(text_of_table, newline=""))
        assert header[:2] == ["method", "ece"] and second_row == ["CE", "", "-2"]
        assert first_row[1:] == ["-0.5", "1"]
        for cell in (header[2], first_row[0]):
            assert cell[0] in "'\\" and cell.endswith(text[-3:])
