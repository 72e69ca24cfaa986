import pytest

from data.errors import InputError
from data.fingerprint import canonical_json, fingerprint


def test_key_order_and_tuples_do_not_matter():
    assert canonical_json({"b": (1, 2), "a": "é"}) == '{"a":"é","b":[1,2]}'
    assert fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), print, {3: 1}])
def test_values_without_a_stable_form_are_refused_by_their_path(value):
    with pytest.raises(InputError, match=r"settings\.part"):
        fingerprint({"part": value})
