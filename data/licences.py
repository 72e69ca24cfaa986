"""Licences of models, as their model cards state them: the YAML head of a README.md."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from semix.data.files import read_bytes
from semix.data.model_identity import ModelCardFacts

CARD = "README.md"
MAX_BYTES = 2**20  # of a card; those of the Hub have a few thousand
MAX_TEXT = 200  # characters of a licence or a name
UNKNOWN = "unknown"
# The names of licences that say that use is not commercial, or for research alone: cc-by-nc-4.0,
# flux-1-dev-non-commercial-license, fair-noncommercial-research-license, intel-research.
NON_COMMERCIAL = re.compile(r"(^|[-_. ])nc([-_. ]|$)|non[-_ ]?commercial|research", re.IGNORECASE)


def read_card(path: Path) -> ModelCardFacts:
    """Licence and base model in a model card; {} if there is no card or it states none.

    Args:
        path: the card. A file that cannot be read as one states nothing.
    """
    try:
        text = read_bytes(path, max_bytes=MAX_BYTES).decode()
    except (OSError, ValueError):
        return {}
    if not text.lstrip().startswith("---"):  # no head, which the library would log
        return {}
    from huggingface_hub import ModelCard  # takes a second

    try:
        data = ModelCard(text, ignore_metadata_errors=True).data
    except Exception:  # of YAML, or of whatever the head holds instead
        return {}
    facts: ModelCardFacts = {}
    if licence := _text(data.get("license")):
        facts["license"] = licence
    if name := _text(data.get("license_name")):
        facts["license_name"] = name
    bases = data.get("base_model")
    listed = bases if isinstance(bases, list) else [bases]
    if names := [name for base in listed if (name := _text(base))]:
        facts["base_model"] = names
    return facts


def licence_of(identity: Mapping[str, Any]) -> str:
    """The licence of a model, by its identity in a plan: `other` gives the name behind it."""
    card = identity.get("card") or {}
    licence = str(card.get("license", UNKNOWN))
    name = str(card.get("license_name", ""))
    return name if name and licence in (UNKNOWN, "other") else licence


def is_non_commercial(identity: Mapping[str, Any]) -> bool:
    """Whether the licence in a model's identity says that use is not commercial."""
    card = identity.get("card") or {}
    return any(NON_COMMERCIAL.search(str(card.get(key, ""))) for key in ("license", "license_name"))


def identities(models: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each model of a plan with its role: generator, generator.lora, annotation.second, ..."""
    for role, identity in models.items():
        if not isinstance(identity, Mapping):
            continue
        yield role, identity
        for name, added in identity.items():
            for each in added if isinstance(added, list) else [added]:
                if isinstance(each, Mapping) and "model" in each:
                    yield f"{role}.{name}", each


def licences(models: Mapping[str, Any]) -> dict[str, str]:
    """The licence of each model by role, with the model it was made from, if its card says so.

    Several LoRAs are joined by commas.
    """
    texts: dict[str, list[str]] = {}
    for role, identity in identities(models):
        bases = (identity.get("card") or {}).get("base_model", [])
        base = f" (from {', '.join(map(str, bases))})" if bases else ""
        texts.setdefault(role, []).append(f"{licence_of(identity)}{base}")
    return {role: ", ".join(each) for role, each in texts.items()}


def licence_notes(models: Mapping[str, Any]) -> list[str]:
    """A warning for each model whose licence says that use is not commercial."""
    return [
        f"{role} {identity.get('model', '')}: its licence, {licence_of(identity)}, is not for "
        "commercial use, which may bind images and classifiers made with it; read it"
        for role, identity in identities(models)
        if is_non_commercial(identity)
    ]


def without_cards(value: Any) -> Any:
    """An identity without what model cards say, which decides nothing."""
    if isinstance(value, Mapping):
        return {key: without_cards(item) for key, item in value.items() if key != "card"}
    return [without_cards(item) for item in value] if isinstance(value, list) else value


def _text(value: object) -> str:
    """A licence or a name, on one line; "" for anything else."""
    if isinstance(value, list) and len(value) == 1:  # the Hub allows a list of licences
        value = value[0]
    return " ".join(value.split())[:MAX_TEXT] if isinstance(value, str) else ""
