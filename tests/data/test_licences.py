"""Licences from model cards: what is stated, what is not for commercial use, what stays unknown."""

from pathlib import Path

import pytest

from semix.data.licences import is_non_commercial, licence_notes, licence_of, licences, read_card

FLUX = """---
license: other
license_name: flux-1-dev-non-commercial-license
license_link: LICENSE.md
base_model: black-forest-labs/FLUX.1-dev
---
# A model
"""


def card_of(text: str | bytes, folder: Path):
    path = folder / "README.md"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_card(path)


def test_licence_name_and_base_model_are_read(tmp_path):
    card = card_of(FLUX, tmp_path)
    assert card == {
        "license": "other",
        "license_name": "flux-1-dev-non-commercial-license",
        "base_model": ["black-forest-labs/FLUX.1-dev"],
    }
    assert licence_of({"card": card}) == "flux-1-dev-non-commercial-license"
    listed = card_of("---\nlicense: [mit]\nbase_model: [a/b, c/d]\n---\n", tmp_path)
    assert listed == {"license": "mit", "base_model": ["a/b", "c/d"]}


@pytest.mark.parametrize(
    "text",
    [
        "# No head",
        "---\nlicense:\n---\n",
        "---\nlicense: {a: 1}\n---\n",
        "---\n[1, 2\n---\n",
        "---\n- a list\n---\n",
        "---\nmodel-index: 3\n---\n",
        b"---\nlicense: \xff\xfe\n---\n",
        b"---\n" + b"a" * 2**20,
        "---\n!!python/object/apply:os.system [exit]\n---\n",
    ],
)
def test_a_card_that_states_nothing_leaves_it_unknown(text, tmp_path):
    assert card_of(text, tmp_path) == {}
    assert licence_of({"model": "a"}) == "unknown"


def test_a_missing_card_and_one_that_is_no_file(tmp_path):
    assert read_card(tmp_path / "README.md") == {}
    (tmp_path / "README.md").mkdir()
    assert read_card(tmp_path / "README.md") == {}


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("cc-by-nc-4.0", True),
        ("cc-by-nc-sa-4.0", True),
        ("flux-1-dev-non-commercial-license", True),
        ("stabilityai-nc-research-community", True),
        ("fair-noncommercial-research-license", True),
        ("Research only", True),
        ("cc-by-4.0", False),
        ("apache-2.0", False),
        ("ncsa", False),
        ("creativeml-openrail-m", False),
        ("unknown", False),
    ],
)
def test_which_licences_are_not_for_commercial_use(licence, expected):
    assert is_non_commercial({"card": {"license": licence}}) is expected
    assert is_non_commercial({"card": {"license": "other", "license_name": licence}}) is expected


def test_every_model_of_a_plan_is_listed_and_warned_of():
    lora = {"model": "anime", "card": {"license": "cc-by-nc-4.0", "base_model": ["a/sd"]}}
    models = {
        "generator": {
            "model": "sd",
            "card": {"license": "openrail"},
            "lora": [lora, {"model": "b"}],
        },
        "annotation": {"model": "clip", "second": {"model": "other", "card": {"license": "mit"}}},
    }
    assert licences(models) == {
        "generator": "openrail",
        "generator.lora": "cc-by-nc-4.0 (from a/sd), unknown",
        "annotation": "unknown",
        "annotation.second": "mit",
    }
    (note,) = licence_notes(models)
    assert note.startswith("generator.lora anime: its licence, cc-by-nc-4.0, is not for commercial")
