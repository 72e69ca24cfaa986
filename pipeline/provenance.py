"""Models and versions that a dataset was made with, and its identity, which follows from them."""

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from semix.data.fingerprint import fingerprint
from semix.data.formats import LabelSetRecord, SeriesByRun
from semix.data.installation import DISTRIBUTION
from semix.data.machine import remembered_digest
from semix.data.model_identity import (
    AnnotationIdentity,
    EncoderIdentity,
    GeneratorIdentity,
    ModelCardFacts,
    ModelIdentities,
    ModelIdentity,
)
from semix.pipeline.config import (
    AnnotationConfig,
    BuildConfig,
    EncoderConfig,
    GeneratorConfig,
    LoraConfig,
)
from semix.pipeline.model_paths import (
    NOT_LOADED,
    card_of,
    loaded_file_hashes,
    loaded_file_names,
    local_path,
    lora_file,
)

PACKAGES = ("torch", "diffusers", "transformers", "open_clip_torch", "peft", "numpy", "pillow")
# Paths, and limits on cost and on series left out: these settings decide no byte of the dataset.
NON_IDENTITY_SETTINGS: dict[str, Any] = {
    "real": {"path", "download"},
    "generator": {"model": True, "unet": True, "tiny_decoder": True, "lora": {"__all__": {"path"}}},
    "annotation": {"model", "pretrained", "second"},
    "noise": {"max_cost", "network"},
    "shards": {"max_left_out"},
}
# Some older roots hashed every file of a folder; others hashed none with these suffixes.
NEWER_SUFFIXES = {".model", ".jinja"}


def labelling_encoders(record: LabelSetRecord) -> AnnotationIdentity:
    """Identities of the CLIP models that a label set is made with."""
    return cast(AnnotationIdentity, record.encoders)


def identity(
    config: BuildConfig,
    class_names: Sequence[str],
    models: ModelIdentities,
    *,
    similar: Sequence[tuple[int, int]] | None = None,
    by_run: SeriesByRun | None = None,
) -> str:
    """Fingerprint of all that decides a dataset's bytes.

    Covers settings that differ from their defaults, so that a new setting leaves the identity of
    old roots as it is; class names; and the content of models, wherever they are.

    Args:
        models: result of `model_identities`.
        similar: the pairs that were drawn by similarity.
        by_run: the series per pair that a run determined.
    """
    pairs = similar if by_run is None else by_run.series
    drawn = [] if pairs is None else [[list(pair) for pair in pairs]]
    return fingerprint([identity_settings(config), contents(models), list(class_names), *drawn])


def identity_settings(config: BuildConfig) -> dict[str, object]:
    """The settings that decide bytes and differ from their defaults.

    Images of older roots have no mark, so it is the mark, though the default, that is mentioned.
    """
    sections = config.model_dump(mode="json", exclude_defaults=True, exclude=NON_IDENTITY_SETTINGS)
    sections.get("shards", {}).pop("mark", None)
    if config.shards.mark:
        sections.setdefault("shards", {})["mark"] = True
    return {name: settings for name, settings in sections.items() if settings}


def contents(models: ModelIdentities) -> dict[str, object]:
    """What decides bytes in the identities of the models."""
    base = models["generator"]
    networks = {
        "unet": [base["unet"]] if "unet" in base else [],
        "lora": base.get("lora", []),
        "tiny_decoder": [base["tiny_decoder"]] if "tiny_decoder" in base else [],
        "noise": [base["noise"]] if "noise" in base else [],
    }
    added = {name: [*map(_content, entries)] for name, entries in networks.items() if entries}
    generator = {"own": _content(base), **added}
    return {"generator": generator, "annotation": _encoder_contents(models["annotation"])}


def annotation_content(annotation: AnnotationConfig, encoders: AnnotationIdentity) -> list[object]:
    """What decides labels: settings, as in `identity_settings`, and the CLIP models."""
    excluded = NON_IDENTITY_SETTINGS["annotation"]
    settings = annotation.model_dump(mode="json", exclude_defaults=True, exclude=excluded)
    return [settings, *_encoder_contents(encoders)]


def model_identities(config: BuildConfig) -> ModelIdentities:
    """Name, revision and, for local files, hashes of generator and annotator.

    Networks that are added to the generator, or replace its own, are listed beside its files.
    """
    generator = generator_identity(config.generator)
    if config.noise.network is not None:
        generator["noise"] = _identity(config.noise.network, None)
    return {"generator": generator, "annotation": annotation_identity(config.annotation)}


def generator_identity(config: GeneratorConfig) -> GeneratorIdentity:
    left_out = {*NOT_LOADED, *(["unet"] if config.unet is not None else [])}
    options = {"variant": config.variant, "left_out": left_out}
    entry: GeneratorIdentity = {**_identity(config.model, config.revision, **options)}
    if config.unet is not None:
        entry["unet"] = _identity(config.unet, config.unet_revision)
    if config.lora:
        entry["lora"] = [_lora_identity(lora) for lora in config.lora]
    if config.tiny_decoder is not None:
        entry["tiny_decoder"] = _identity(config.tiny_decoder, config.tiny_decoder_revision)
    return entry


def model_cards(config: BuildConfig) -> dict[str, Any]:
    """Name and model card of each model, in the shape of `model_identities`; no file is hashed."""

    def entry(model: str, revision: str | None = None) -> dict[str, Any]:
        return {"model": model, "card": card_of(model, revision)}

    settings = config.generator
    generator = entry(settings.model, settings.revision)
    generator["lora"] = [entry(lora.path, lora.revision) for lora in settings.lora]
    for name, model, revision in (
        ("unet", settings.unet, settings.unet_revision),
        ("tiny_decoder", settings.tiny_decoder, settings.tiny_decoder_revision),
        ("noise", config.noise.network, None),
    ):
        if model is not None:
            generator[name] = entry(model, revision)
    first, *second = (
        {"model": encoder.model, "card": _encoder_card(encoder)}
        for _, encoder in config.annotation.encoders
    )
    return {"generator": generator, "annotation": first | ({"second": second[0]} if second else {})}


def annotation_identity(config: AnnotationConfig) -> AnnotationIdentity:
    entry: AnnotationIdentity = {**encoder_identity(config.first, config.dtype)}
    if config.second is not None:
        entry["second"] = encoder_identity(config.second, config.dtype)
    return entry


def encoder_identity(config: EncoderConfig, dtype: str) -> EncoderIdentity:
    """Identity of one CLIP model, with hashes of all its local files."""
    files = file_hashes(Path(config.model.removeprefix("local-dir:")))
    if config.pretrained:
        files |= file_hashes(Path(config.pretrained))
    entry: EncoderIdentity = {
        "model": config.model,
        "pretrained": config.pretrained,
        "dtype": dtype,
        "files": files,
    }
    if config.revision is not None:
        entry["revision"] = config.revision
    if card := _encoder_card(config):
        entry["card"] = card
    return entry


def _encoder_card(config: EncoderConfig) -> ModelCardFacts:
    """The card of a CLIP model; {} for one that a tag of open_clip names."""
    prefix, _, name = config.model.partition(":")
    if prefix in ("local-dir", "hf-hub"):
        return card_of(name, config.revision)
    weights = Path(config.pretrained) if config.pretrained else None
    return card_of(str(weights)) if weights and weights.is_file() else {}


def encoder_content(identity: EncoderIdentity) -> dict[str, object]:
    """What decides features in an encoder's identity: local files, but not their paths."""
    files = identity["files"]
    in_folder = identity["model"].startswith("local-dir:")
    local_weights = identity["pretrained"] and Path(identity["pretrained"]).name in files
    return {
        "model": None if in_folder else identity["model"],
        "pretrained": None if in_folder or local_weights else identity["pretrained"],
        "revision": identity.get("revision"),
        "dtype": identity["dtype"],
        "files": files,
    }


@cache  # reading the packages' metadata takes as long as a small shard
def library_versions() -> dict[str, str]:
    own = {"python": platform.python_version(), "semix": version(DISTRIBUTION)}
    return own | {name: version(name) for name in PACKAGES}


def _encoder_contents(identity: AnnotationIdentity) -> list[dict[str, object]]:
    second = identity.get("second")
    return [encoder_content(encoder) for encoder in (identity, second) if encoder]


def unchanged(then: Any, now: Any) -> bool:
    """Whether the present contents of models equal those that a root was started with.

    Args:
        then: possibly recorded by an older root, which hashed all files of a folder.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        return then.keys() == now.keys() and all(
            _same_files(then[key], now[key]) if key == "files" else unchanged(then[key], now[key])
            for key in then
        )
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(unchanged, then, now))
    return bool(then == now)


def _same_files(then: dict[str, str], now: dict[str, str]) -> bool:
    names = (name for name in now if name in then or Path(name).suffix not in NEWER_SUFFIXES)
    comparable = {name: now[name] for name in names}
    return bool(then) == bool(now) and loaded_file_hashes(then, now) == comparable


def _identity(model: str, revision: str | None, **options: Any) -> ModelIdentity:
    path = local_path(model)
    files = file_hashes(path, **options) if path else {}
    return _with_card({"model": model, "revision": revision, "files": files}, model)


def _with_card(identity: ModelIdentity, path: str) -> ModelIdentity:
    """The identity with what the model's card states, if it states anything."""
    card = card_of(path, identity["revision"])
    return {**identity, "card": card} if card else identity


def _lora_identity(lora: LoraConfig) -> ModelIdentity:
    path = local_path(lora.path)
    files = file_hashes(Path(*lora_file(lora))) if path else {}
    return _with_card({"model": lora.path, "revision": lora.revision, "files": files}, lora.path)


def file_hashes(path: Path, **options: Any) -> dict[str, str]:
    """SHA-256, by name, of a file or of the files in a folder that decide what a model computes.

    Args:
        options: keyword arguments of `semix.pipeline.model_paths.loaded_file_names`.
    """
    if path.is_file():
        return {path.name: remembered_digest(path)}
    if not path.is_dir():
        return {}
    return {name: remembered_digest(path / name) for name in loaded_file_names(path, **options)}


def _content(identity: ModelIdentity) -> dict[str, object]:
    """The local files where there are any; else the name and commit on the hub."""
    if identity["files"]:
        return {"files": identity["files"]}
    return {"model": identity["model"], "revision": identity["revision"]}
