"""GPU hours in money: read from free text, in the check and in what a root has cost."""

import json

import pytest
from semix.data.errors import InputError
from semix.data.root import Root
from semix.flows.build import check
from semix.flows.prices import Price, price_of_check, price_of_root, words_of_check, words_of_root
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
    with pytest.raises(InputError) as refused:
        Price.read(text)
    assert (refused.value.field, refused.value.value) == ("--price", text)
    assert refused.value.remedy.endswith("write 2.49, 1234.50 or 1,234.50")


@pytest.mark.parametrize("text", ["cheap", "-2", "2 or 3", "1e5", "EUR"])
def test_a_price_that_is_no_number_is_refused(text):
    with pytest.raises(InputError, match=r"^--price = .*: give the price of one GPU"):
        Price.read(text)


def test_the_check_tells_money_of_its_hours(hasty_config, tmp_path):
    facts = check(hasty_config, str(tmp_path / "x"), rate=0.001)
    price = Price(2.0, "EUR")
    found = price_of_check(facts, price)
    assert found["estimated"] == pytest.approx(2 * facts["hours"])
    assert found["of_which_noise"] == 0 and "stages" not in found
    assert words_of_check({**found, "estimated": 3.0}, price) == "3.00 EUR"
    timed = {"hours": 10.0, "seconds": 2.0, "stages": {"generate": 1.5, "clip": 0.5}}
    dear = {**facts, "hours": 12.0, "noise_ratio": 0.5, "timed": timed}
    found = price_of_check(dear, price)
    assert found["of_which_noise"] == pytest.approx(24 / 3)
    # A third of the ten hours chooses noise; the rest is the batch's.
    stages = {"generate": 10.0, "clip": 10 / 3, "choosing noise": 20 / 3}
    assert found["stages"] == pytest.approx(stages)
    assert words_of_check(found, price) == (
        "24.00 EUR, of which noise selection 8.00 EUR; at the measured speed 20.00 EUR (generate "
        "10.00 EUR, choosing noise 6.67 EUR, clip 3.33 EUR)"
    )
    unknown = price_of_check({**facts, "hours": None}, price)
    assert (unknown["estimated"], words_of_check(unknown, price)) == (None, "not known")


def test_a_root_tells_what_it_has_cost_and_what_is_left(hasty_config, tmp_path):
    root = Root(made(hasty_config, tmp_path / "root").url)
    root.discard(3)
    found, price = root.progress(), Price(3600.0)
    left = derived_metrics(found)["worker_seconds_left"]
    told = price_of_root(found, left, price)
    assert told["spent"] == pytest.approx(found.seconds)
    assert told["left"] == pytest.approx(left) and left > 0
    assert told["stages"] == pytest.approx(found.stages)
    words = words_of_root(told, price)
    assert " so far (generate " in words and words.endswith(" left")


def test_status_and_check_take_a_price(hasty_config, tmp_path):
    url = made(hasty_config, tmp_path / "root").url
    status, out, err = semix("status", url, "--price", "2.49 EUR", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["price"]["currency"] == "EUR" and found["price"]["left"] in (None, 0)
    assert found["price"]["spent"] == pytest.approx(Root(url).progress().seconds / 3600 * 2.49)
    status, _, err = semix("status", url, "--price", "cheap")
    assert status == 2 and "--price = cheap: give the price of one GPU for one hour" in err
