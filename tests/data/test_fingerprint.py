import pytest

from data.errors import InputError
from data.fingerprint import canonical_json, fingerprint, folder_digest


def test_key_order_and_tuples_do_not_matter():
    assert canonical_json({"b": (1, 2), "a": "é"}) == '{"a":"é","b":[1,2]}'
    assert fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), print, {3: 1}])
def test_values_without_a_stable_form_are_refused_by_their_path(value):
    with pytest.raises(InputError, match=r"settings\.part"):
        fingerprint({"part": value})


def test_folder_digest_sees_names_and_contents_but_not_location(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "file").write_text("same")
    assert folder_digest(tmp_path / "one") == folder_digest(tmp_path / "two")
    (tmp_path / "two" / "sub" / "file").write_text("other")
    assert folder_digest(tmp_path / "one") != folder_digest(tmp_path / "two")
