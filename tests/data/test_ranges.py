import pytest

from data.errors import InputError
from data.ranges import format_ranges, parse_ranges


def test_ranges_round_trip():
    assert parse_ranges("3, 7-9") == {3, 7, 8, 9}
    assert format_ranges([9, 3, 7, 8]) == "3,7-9"


@pytest.mark.parametrize("text", ["", "a", "3-", "9-7", "-1", "1,,2"])
def test_nonsense_is_refused(text):
    with pytest.raises(InputError, match="write numbers and ranges such as 3,7-9"):
        parse_ranges(text)


@pytest.mark.parametrize("text", ["0-10000000", "5,99999999999", "0-9999999999999999"])
def test_more_shards_than_any_root_has_are_refused(text):
    with pytest.raises(InputError, match="names too many, or too large ones; at most 10,000,000"):
        parse_ranges(text)
