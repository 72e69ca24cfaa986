import pytest
import torch

from semix.data.errors import InputError
from semix.data.fingerprint import (
    canonical_json,
    derived_seed,
    fingerprint,
    generator_for,
    hashed_seed,
)


def test_key_order_and_tuples_do_not_matter():
    assert canonical_json({"b": (1, 2), "a": "é"}) == '{"a":"é","b":[1,2]}'
    assert fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), print, {3: 1}])
def test_values_without_a_stable_form_are_refused_by_their_path(value):
    with pytest.raises(InputError, match=r"settings\.part"):
        fingerprint({"part": value})


def test_seeds_are_the_first_digits_of_sha256():
    """SHA-256 of `0/7` is 8cc99d736ffa5304..., of `[0,"base",1]` a872fc5c3705ffe..."""
    assert hashed_seed(0, 7) == 0x8CC99D736FFA5304 >> 1
    assert derived_seed(0, "base", 1) == 0xA872FC5C3705FFE


def test_random_numbers_of_one_purpose_say_nothing_of_another():
    keys = [(0, 1), (1, 0), (0, 2), (0, 1, "order"), ("0", 1)]
    numbers = {key: torch.rand(4, generator=generator_for(*key)) for key in keys}
    assert len({derived_seed(*key) for key in keys}) == len(keys)
    assert len({tuple(values.tolist()) for values in numbers.values()}) == len(keys)
    assert torch.equal(numbers[0, 1], torch.rand(4, generator=generator_for(0, 1)))
