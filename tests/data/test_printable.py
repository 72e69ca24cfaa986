import json

import pytest

from semix.data.printable import (
    markdown_text,
    print_line,
    print_traceback,
    printable,
    printable_line,
    spreadsheet_text,
)


@pytest.mark.parametrize("text", ["caf\u00e9 \u732b \U0001f408\n\tx", "", "[1, 2] \\u0041"])
def test_what_people_write_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("\x1b[2Jgone", r"\u001b[2Jgone"),
        ("a\rb\x9bc\x00", r"a\u000db\u009bc\u0000"),
        ("cat\u202egod", r"cat\u202egod"),
        ("x\u200by\U000e0041", r"x\u200by\udb40\udc41"),
    ],
)
def test_what_steers_a_terminal_is_spelled_out(text, spelled):
    assert printable(text) == spelled
    assert json.loads(printable(json.dumps([text], ensure_ascii=False))) == [text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("LS $x$ 5 % - ok", "LS $x$ 5 % - ok"),
        ("<b>&lt;|`", r"\<b\>\&lt;\|\`"),
        ("a\n\n# b\\ ~~c~~", r"a \# b\\ \~\~c\~\~"),
        ("![i](x) _y_ *z*", r"!\[i\](x) \_y\_ \*z\*"),
        ("a\x1b[2J\u202eb", r"a\u001b\[2J\u202eb"),
    ],
)
def test_what_markdown_would_read_as_its_own_is_escaped_in_one_line(text, shown):
    assert markdown_text(text) == shown


def test_a_value_in_a_sentence_begins_no_line_of_its_own():
    assert printable_line("a\nerror: b\tc\x1b") == r"a\nerror: b\tc\u001b"
    assert printable_line("caf\u00e9 \u732b") == "caf\u00e9 \u732b"


def test_what_a_process_prints_is_one_message(capsys):
    print_line("one\ntwo\x07")
    try:
        raise ValueError("bad\x1b[2J")
    except ValueError:
        print_traceback()
    output = capsys.readouterr()
    assert output.out == "one\n  two\\u0007\n"
    assert output.err.startswith("Traceback") and output.err.endswith("ValueError: bad\\u001b[2J\n")


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("CE + TS", "CE + TS"),
        ("a=b", "a=b"),
        ("", ""),
        ("=1+1", "'=1+1"),
        ("-2", "'-2"),
        ("@A1", "'@A1"),
        ("\t=1", r"\t=1"),
        ("a\r=1", r"a\u000d=1"),
    ],
)
def test_a_cell_of_text_is_calculated_by_no_spreadsheet(text, cell):
    assert spreadsheet_text(text) == cell
