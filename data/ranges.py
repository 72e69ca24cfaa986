"""Lists of shard numbers as a person types them."""

from data.errors import InputError


def parse_ranges(text: str) -> frozenset[int]:
    """`3,7-9` -> {3, 7, 8, 9}. Raises InputError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > int(numbers[1]):
            raise InputError("shards", text, "write numbers and ranges such as 3,7-9")
        found.update(range(int(numbers[0]), int(numbers[1]) + 1))
    return frozenset(found)


def format_ranges(numbers: list[int]) -> str:
    """[3, 7, 8, 9] -> `3,7-9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
