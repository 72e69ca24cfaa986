"""What GPU hours cost: before they are spent, from estimates, and after, from the records."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semix.data.errors import InputError
from semix.data.root import RootProgress

FIGURES = re.compile(r"[\d.,]*\d[\d.,]*")
# A point before decimals, commas between groups of three; Rs.300 is no fraction.
NUMBER = re.compile(r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\w)\.\d+")


@dataclass(frozen=True)
class Price:
    """Of an hour of one worker's GPU.

    Attributes:
        currency: whatever stood beside the number.
    """

    hour: float
    currency: str = ""

    @classmethod
    def read(cls, text: str) -> "Price | None":
        """`2.49`, `2.49 EUR`, `$2.49` or `3,500 KRW`; None of an empty text.

        Raises:
            InputError: no number, several, or one that can be read in two ways, as `2,49`.
        """
        if not text:
            return None
        numbers = list(FIGURES.finditer(text))
        currency = " ".join(FIGURES.sub(" ", text).split())
        if len(numbers) != 1 or re.search(r"[-+]", currency):
            remedy = "give what an hour of one GPU costs, as 2.49, '2.49 EUR' or '$2.49'"
            raise InputError("--price", text, remedy)
        number = NUMBER.fullmatch(text, *numbers[0].span())
        if number is None:
            remedy = "a point comes before decimals, and commas between thousands"
            raise InputError("--price", text, f"{remedy}; write 2.49, 1234.50 or 1,234.50")
        return cls(float(number[0].replace(",", "")), currency)

    def of(self, seconds: float) -> float:
        return seconds / 3600 * self.hour

    def words(self, amount: float) -> str:
        """`12.30 EUR`."""
        return f"{amount:,.2f} {self.currency}".rstrip() if amount >= 0.005 else "less than 0.01"


def price_of_check(facts: Mapping[str, Any], price: Price) -> dict[str, Any]:
    """What a whole build will cost, by what `--check` found; None where its hours are not known.

    Noise that is chosen has its own part; with `--time` also at the batch's speed, by stage.
    """
    hours, timed = facts["hours"], facts["timed"]
    found: dict[str, Any] = {"hour": price.hour, "currency": price.currency, "estimated": None}
    if hours is not None:
        noise = facts["noise_ratio"] / (1 + facts["noise_ratio"])
        found |= {"estimated": hours * price.hour, "of_which_noise": hours * noise * price.hour}
    if timed is not None:
        whole, chosen = timed["hours"] * price.hour, facts["noise_ratio"]
        batch = whole / (1 + chosen) / timed["seconds"]  # for a second of the batch
        stages = {name: seconds * batch for name, seconds in timed["stages"].items()}
        if chosen:
            stages["choosing noise"] = whole * chosen / (1 + chosen)
        found |= {"at_measured_speed": whole, "stages": stages}
    return found


def words_of_check(found: Mapping[str, Any], price: Price) -> str:
    """The same in a line."""
    if found["estimated"] is None:
        return "not known"
    said = price.words(found["estimated"])
    if found["of_which_noise"]:
        said += f", of which choosing noise {price.words(found['of_which_noise'])}"
    if "stages" in found:
        speed = price.words(found["at_measured_speed"])
        said += f"; at the batch's speed {speed} ({_stages(found, price)})"
    return said


def price_of_root(progress: RootProgress, left: float | None, price: Price) -> dict[str, Any]:
    """What a root's shards have cost and what is missing will, at the rates of its records.

    Loading models, waiting and work that was lost are in no record.

    Args:
        left: seconds of one worker that are still to come, where that is known.
    """
    return {
        "hour": price.hour,
        "currency": price.currency,
        "spent": price.of(progress.seconds),
        "left": None if left is None else price.of(left),
        "stages": {name: price.of(seconds) for name, seconds in progress.stages.items()},
    }


def words_of_root(found: Mapping[str, Any], price: Price) -> str:
    """`12.30 EUR so far (generate 11.80 EUR, encode 0.40 EUR, ...), 3.10 EUR left`."""
    said = f"{price.words(found['spent'])} so far"
    if found["stages"]:
        said += f" ({_stages(found, price)}; stages run beside each other)"
    return f"{said}, {price.words(found['left'])} left" if found["left"] else said


def _stages(found: Mapping[str, Any], price: Price) -> str:
    """`generate 11.80 EUR, encode 0.40 EUR`: the dearest first."""
    ordered = sorted(found["stages"].items(), key=lambda stage: -stage[1])
    return ", ".join(f"{name} {price.words(amount)}" for name, amount in ordered)
