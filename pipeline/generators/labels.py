"""Class names to the numbers of a model's own labels."""

import difflib
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from data.errors import InputError

FIELD = "generator.names"


def label_numbers(
    names: Sequence[str], known: Mapping[int, str], count: int, *, numbers: Collection[str] = ()
) -> list[int]:
    """The label that each name means, case and underscores aside.

    Args:
        known: names of the labels; several names of one are separated by commas.
        count: labels of the model.
        numbers: names that may be a label's number instead.
    Raises:
        InputError: a name that is no label, or that several labels share.
    """
    by_name: dict[str, set[int]] = defaultdict(set)
    for number, text in known.items():
        for name in (text, *text.split(",")):
            by_name[_plain(name)].add(number)
    return [_number(name, by_name, count, name in numbers) for name in names]


def _number(name: str, by_name: Mapping[str, set[int]], count: int, by_number: bool) -> int:
    found = sorted(by_name.get(_plain(name), ()))
    if len(found) == 1:
        return found[0]
    if found:
        shared = ", ".join(map(str, found))
        raise InputError(FIELD, repr(name), f"is what labels {shared} are called; give the number")
    if by_number and name.isdecimal():
        if int(name) < count:
            return int(name)
        raise InputError(FIELD, repr(name), f"the model's labels are 0 to {count - 1}")
    near = difflib.get_close_matches(_plain(name), by_name, n=3)
    hint = f" such as {', '.join(near)}" if near else ""
    remedy = f"is no label of the model; map it to one{hint} or to a label's number"
    raise InputError(FIELD, repr(name), remedy)


def _plain(name: str) -> str:
    spaced = unicodedata.normalize("NFC", name).replace("_", " ")
    return " ".join(spaced.split()).casefold()
