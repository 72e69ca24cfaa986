import json

import pytest

from data.printable import markdown_text, printable


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
    ],
)
def test_what_markdown_would_read_as_its_own_is_escaped_in_one_line(text, shown):
    assert markdown_text(text) == shown
