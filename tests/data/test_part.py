import pytest

from data.errors import InputError
from data.part import WHOLE, Part, parse_part


def test_parts_are_contiguous_and_cover_everything_once():
    assert [Part(i, 3).bounds(10) for i in range(3)] == [(0, 3), (3, 6), (6, 10)]
    assert WHOLE.bounds(10) == (0, 10)
    for of in (1, 2, 7, 12):
        numbers = [n for i in range(of) for n in range(*Part(i, of).bounds(10))]
        assert numbers == list(range(10))


def test_each_part_turns_to_another_one_first():
    assert [str(part) for part in Part(2, 4).others()] == ["3/4", "0/4", "1/4"]
    assert WHOLE.others() == []


def test_a_part_is_read_as_it_is_written():
    assert parse_part("1/4") == Part(1, 4)
    assert str(parse_part("1/4")) == "1/4"
    assert parse_part("") == WHOLE


@pytest.mark.parametrize("text", ["4/4", "1", "-1/4", "1/0", "a/b", "1/4/2", "0 / 4", "0/9999999"])
def test_other_texts_are_refused(text):
    with pytest.raises(InputError, match=f"^range = {text}: write i/n with i from 0 to n - 1"):
        parse_part(text)
