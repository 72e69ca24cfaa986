"""Cost of GPU hours: of a planned build from estimates, of a root from its records."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semix.data.errors import InputError
from semix.data.root import RecordTotals

DIGITS = re.compile(r"[\d.,]*\d[\d.,]*")
# A point before decimals, commas between groups of three; the point of Rs.300 is not a decimal one.
NUMBER = re.compile(r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\w)\.\d+")


@dataclass(frozen=True)
class Price:
    """The price of one worker's GPU for one hour.

    Attributes:
        currency: the text before or after the number.
    """

    per_hour: float
    currency: str = ""

    @classmethod
    def read(cls, text: str) -> "Price | None":
        """Read `2.49`, `2.49 EUR`, `$2.49` or `3,500 KRW`; None for an empty text.

        Raises:
            InputError: no number, several, or an ambiguous one, as `2,49`.
        """
        if not text:
            return None
        numbers = list(DIGITS.finditer(text))
        currency = " ".join(DIGITS.sub(" ", text).split())
        if len(numbers) != 1 or re.search(r"[-+]", currency):
            remedy = "give the price of one GPU for one hour, as 2.49, '2.49 EUR' or '$2.49'"
            raise InputError("--price", text, remedy)
        number = NUMBER.fullmatch(text, *numbers[0].span())
        if number is None:
            remedy = "use a point before decimals and commas between thousands"
            raise InputError("--price", text, f"{remedy}; write 2.49, 1234.50 or 1,234.50")
        return cls(float(number[0].replace(",", "")), currency)

    def cost_of(self, seconds: float) -> float:
        return seconds / 3600 * self.per_hour

    def text_of(self, amount: float) -> str:
        """`12.30 EUR`."""
        return f"{amount:,.2f} {self.currency}".rstrip() if amount >= 0.005 else "less than 0.01"


def build_cost(facts: Mapping[str, Any], price: Price) -> dict[str, Any]:
    """The cost of a whole build from the facts of `--check`.

    `estimated` is None if the hours are not known. Noise selection is listed separately: it costs
    `noise_ratio` times what generating costs. With `--time` there is also the cost at the measured
    speed, by stage.
    """
    hours, timed = facts["hours"], facts["timed"]
    cost: dict[str, Any] = {"hour": price.per_hour, "currency": price.currency, "estimated": None}
    if hours is not None:
        noise = facts["noise_ratio"] / (1 + facts["noise_ratio"])
        cost |= {
            "estimated": hours * price.per_hour,
            "of_which_noise": hours * noise * price.per_hour,
        }
    if timed is not None:
        total, noise_ratio = timed["hours"] * price.per_hour, facts["noise_ratio"]
        # Cost per second of the timed batch, without noise selection.
        cost_per_second = total / (1 + noise_ratio) / timed["seconds"]
        stages = {name: seconds * cost_per_second for name, seconds in timed["stages"].items()}
        if noise_ratio:
            stages["choosing noise"] = total * noise_ratio / (1 + noise_ratio)
        cost |= {"at_measured_speed": total, "stages": stages}
    return cost


def describe_build_cost(cost: Mapping[str, Any], price: Price) -> str:
    """The cost of a build in one line."""
    if cost["estimated"] is None:
        return "not known"
    text = price.text_of(cost["estimated"])
    if cost["of_which_noise"]:
        text += f", of which noise selection {price.text_of(cost['of_which_noise'])}"
    if "stages" in cost:
        speed = price.text_of(cost["at_measured_speed"])
        text += f"; at the measured speed {speed} ({_stages(cost, price)})"
    return text


def root_cost(totals: RecordTotals, left: float | None, price: Price) -> dict[str, Any]:
    """The cost of a root's shards, done and missing, from the times in its records.

    Loading of models, waiting and lost work are not recorded.

    Args:
        left: remaining seconds of one worker, if known.
    """
    return {
        "hour": price.per_hour,
        "currency": price.currency,
        "spent": price.cost_of(totals.seconds),
        "left": None if left is None else price.cost_of(left),
        "stages": {name: price.cost_of(seconds) for name, seconds in totals.stages.items()},
    }


def describe_root_cost(cost: Mapping[str, Any], price: Price) -> str:
    """`12.30 EUR so far (generate 11.80 EUR, encode 0.40 EUR, ...), 3.10 EUR left`."""
    text = f"{price.text_of(cost['spent'])} so far"
    if cost["stages"]:
        text += f" ({_stages(cost, price)}; stages run in parallel)"
    return f"{text}, {price.text_of(cost['left'])} left" if cost["left"] else text


def _stages(cost: Mapping[str, Any], price: Price) -> str:
    """`generate 11.80 EUR, encode 0.40 EUR`: the most expensive stage first."""
    ordered = sorted(cost["stages"].items(), key=lambda stage: -stage[1])
    return ", ".join(f"{name} {price.text_of(amount)}" for name, amount in ordered)
