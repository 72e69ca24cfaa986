"""Shard numbers as a person types them: lists and ranges, and parts of a whole."""

import pytest

from data.errors import InputError
from data.ranges import WHOLE, Part, format_ranges, parse_part, parse_ranges


def test_ranges_round_trip():
    assert parse_ranges("3, 7-9,8") == [3, 7, 8, 9]
    assert format_ranges([9, 3, 7, 8]) == "3,7-9"
    assert format_ranges([]) == ""


@pytest.mark.parametrize("text", ["", "a", "3-", "9-7", "-1", "1,,2"])
def test_nonsense_is_refused(text):
    with pytest.raises(InputError, match="write numbers and ranges such as 3,7-9"):
        parse_ranges(text)


@pytest.mark.parametrize("text", ["0-10000000", "5,99999999999", "0-9999999999999999"])
def test_more_shards_than_any_root_has_are_refused(text):
    with pytest.raises(InputError, match="names too many, or too large ones; at most 10,000,000"):
        parse_ranges(text)


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
