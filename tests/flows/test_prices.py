"""GPU hours in money: read from free text, in the check and in what a root has cost."""

import json

import pytest

from semix.data.errors import InputError
from semix.data.root import Root
from semix.flows.build import check
from semix.flows.prices import Price, build_cost, describe_build_cost, describe_root_cost, root_cost
from semix.flows.progress import derived_metrics
from tests.command import semix
from tests.pipeline.roots import made


@pytest.mark.parametrize(
    ("text", "hour", "currency"),
    [
        ("2.49", 2.49, ""),
        ("2.49 EUR", 2.49, "EUR"),
        ("$2.49", 2.49, "$"),
        ("CHF 3", 3.0, "CHF"),
        ("1.80 euros an hour", 1.8, "euros an hour"),
        (".5", 0.5, ""),
        ("3,500 KRW", 3500.0, "KRW"),
        ("3500 KRW", 3500.0, "KRW"),
        ("1,234.50 USD", 1234.5, "USD"),
        ("VND 12,345,678", 12345678.0, "VND"),
    ],
)
def test_a_price_is_a_number_and_free_text(text, hour, currency):
    assert Price.read(text) == Price(hour, currency)


@pytest.mark.parametrize(
    "text",
    [
        "2,49 EUR",
        "1.234,50",
        "1,80",
        ",5",
        "0,500",
        "1,2345",
        "12,34,567",
        "3,500,",
        "1.2.3",
        "Rs.300",
    ],
)
def test_a_price_that_can_be_read_in_two_ways_is_refused_with_the_form_to_write(text):
    with pytest.raises(InputError) as caught:
        Price.read(text)
    assert (caught.value.field, caught.value.value) == ("--price", text)
    assert caught.value.remedy.endswith("write 2.49, 1234.50 or 1,234.50")


@pytest.mark.parametrize("text", ["cheap", "-2", "2 or 3", "1e5", "EUR"])
def test_a_price_that_is_no_number_is_refused(text):
    with pytest.raises(InputError, match=r"^--price = .*: give the price of one GPU"):
        Price.read(text)


def test_the_check_tells_money_of_its_hours(hasty_config, tmp_path):
    facts = check(hasty_config, str(tmp_path / "x"), rate=0.001)
    price = Price(2.0, "EUR")
    cost = build_cost(facts, price)
    assert cost["estimated"] == pytest.approx(2 * facts["hours"])
    assert cost["of_which_noise"] == 0 and "stages" not in cost
    assert describe_build_cost({**cost, "estimated": 3.0}, price) == "3.00 EUR"
    timed = {"hours": 10.0, "seconds": 2.0, "stages": {"generate": 1.5, "clip": 0.5}}
    dear = {**facts, "hours": 12.0, "noise_ratio": 0.5, "timed": timed}
    cost = build_cost(dear, price)
    assert cost["of_which_noise"] == pytest.approx(24 / 3)
    # A third of the ten hours chooses noise; the rest is the batch's.
    stages = {"generate": 10.0, "clip": 10 / 3, "choosing noise": 20 / 3}
    assert cost["stages"] == pytest.approx(stages)
    assert describe_build_cost(cost, price) == (
        "24.00 EUR, of which noise selection 8.00 EUR; at the measured speed 20.00 EUR (generate "
        "10.00 EUR, choosing noise 6.67 EUR, clip 3.33 EUR)"
    )
    unknown = build_cost({**facts, "hours": None}, price)
    assert (unknown["estimated"], describe_build_cost(unknown, price)) == (None, "not known")


def test_a_root_tells_what_it_has_cost_and_what_is_left(hasty_config, tmp_path):
    root = Root(made(hasty_config, tmp_path / "root").url)
    root.discard(3)
    totals, price = root.totals(), Price(3600.0)
    seconds_left = derived_metrics(root.progress(), totals)["worker_seconds_left"]
    cost = root_cost(totals, seconds_left, price)
    assert cost["spent"] == pytest.approx(totals.seconds)
    assert cost["left"] == pytest.approx(seconds_left) and seconds_left > 0
    assert cost["stages"] == pytest.approx(totals.stages)
    text = describe_root_cost(cost, price)
    assert " so far (generate " in text and text.endswith(" left")


def test_status_and_check_take_a_price(hasty_config, tmp_path):
    url = made(hasty_config, tmp_path / "root").url
    status, out, err = semix("status", url, "--price", "2.49 EUR", "--json")
    assert status == 0, err
    facts = json.loads(out)
    assert facts["price"]["currency"] == "EUR" and facts["price"]["left"] in (None, 0)
    assert facts["price"]["spent"] == pytest.approx(Root(url).totals().seconds / 3600 * 2.49)
    status, _, err = semix("status", url, "--price", "cheap")
    assert status == 2 and "--price = cheap: give the price of one GPU for one hour" in err
