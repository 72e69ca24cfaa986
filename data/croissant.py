"""Croissant metadata (croissant.json) of an export and of the shards that an index pins.

Croissant 1.1 with the vocabulary of responsible AI (RAI) 1.0: what the files are, with their
hashes; which fields they have; what they were derived from and by what they were generated. What
only a person knows comes from a `DatasetCard`; what nobody stated is left out, and named.
Source: https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from semix.data.exclusion import newest_flags
from semix.data.formats import FLAGS, Flag
from semix.data.licences import identities, licence_of
from semix.data.lineage import DIGITS
from semix.data.pinned import PinnedRoot
from semix.data.settings import Settings

CROISSANT = "croissant.json"
CONFORMS_TO = [
    "http://mlcommons.org/croissant/1.1",
    "http://mlcommons.org/croissant/RAI/1.0",
]
CONTEXT: dict[str, Any] = {  # the standard one, with `prov`
    "@language": "en",
    "@vocab": "https://schema.org/",
    "arrayShape": "cr:arrayShape",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isArray": "cr:isArray",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "name": {"@container": "@language"},
    "parentField": "cr:parentField",
    "path": "cr:path",
    "prov": "http://www.w3.org/ns/prov#",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
# What a flag of the audit says of a series, for the limitations.
FLAGGED: dict[Flag, str] = {
    "backwards": "have CLIP weights that fall where the mixing weight rises",
    "not_monotone": "have CLIP weights that do not rise steadily with the mixing weight",
    "end_points": "have an unmixed image that CLIP finds nearest to another class",
    "duplicate": "resemble an earlier series",
    "still": "have neighbouring images that do not differ",
    "degenerate": "are flat, black or white, or have features that are not finite",
    "concept": "have an image near a text that the audit was given",
}
LIMITATION = (
    "Images come from a generative model and need not look like photographs of their classes; soft "
    "labels are computed, not given by people."
)
BIAS = (
    "Images and labels inherit the biases of the generator, of CLIP and of the real images behind "
    "the class prototypes."
)
ExportLayout = Literal["folder", "parquet", "huggingface"]


class DatasetCard(Settings):
    """What a person states about a dataset, for its Croissant metadata (`--card FILE.yaml`)."""

    name: str | None = Field(None, description="of the dataset")
    description: str | None = Field(None, description="in a sentence or two")
    license: str | None = Field(None, description="SPDX identifier or URL")
    creators: tuple[str, ...] = Field((), description="names of people or organisations")
    url: str | None = Field(None, description="page of the dataset")
    version: str | None = Field(
        None, pattern=r"^\d+\.\d+\.\d+$", description="MAJOR.MINOR.PATCH, in quotes"
    )
    date_published: date | None = Field(None, description="as 2026-11-26")
    cite_as: str | None = Field(None, description="BibTeX")
    real_data: str | None = Field(None, description="name or URL of the real images")
    limitations: tuple[str, ...] = Field((), description="rai:dataLimitations, added to the known")
    biases: tuple[str, ...] = Field((), description="rai:dataBiases, added to the known")
    personal_sensitive_information: str | None = Field(
        None, description="rai:personalSensitiveInformation: none, or which"
    )
    use_cases: tuple[str, ...] = Field((), description="rai:dataUseCases")
    social_impact: str | None = Field(None, description="rai:dataSocialImpact")


def missing_fields(card: DatasetCard) -> list[str]:
    """The fields that are empty and that Croissant, or NeurIPS 2026, asks for."""
    filled = {"name", "description", "real_data", "limitations", "biases"}  # by semix
    asked = (name for name in DatasetCard.model_fields if name not in filled)
    return [name for name in asked if not getattr(card, name)]


def export_metadata(
    source: PinnedRoot, folder: Path, card: DatasetCard, *, layout: ExportLayout, within: str = ""
) -> dict[str, Any]:
    """The metadata of an exported folder, whose files are hashed.

    Args:
        folder: as `write_image_folder`, `write_parquet` or `write_hugging_face` filled it.
        within: its path from where the metadata will lie; "" in the folder itself.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    if layout == "folder":
        images = sorted({Path(name).suffix for name in names if "/" in name})
        described = [_file(folder, "labels.csv", "text/csv"), *_image_sets(images)]
        records = _table(source, _csv_fields(), {"fileObject": {"@id": "labels.csv"}}, text=True)
    else:
        parquet = [name for name in names if name.endswith(".parquet")]
        described = [_file(folder, name, "application/x-parquet", within) for name in parquet]
        pattern = f"{within}/*.parquet" if within else "data/*.parquet"
        described.append(_file_set("parquet-files", pattern, "application/x-parquet"))
        records = _table(source, _parquet_fields(len(source.class_names)), FILES, text=False)
    described += [_file(folder, n, "application/json") for n in names if n == "classes.json"]
    return _dataset(source, card, described, records)


def index_metadata(source: PinnedRoot, card: DatasetCard) -> dict[str, Any]:
    """The metadata of the shards that an index pins; paths are relative to the root."""
    tars = [
        {
            "@type": "cr:FileObject",
            "@id": shard.tar,
            "name": shard.tar,
            "contentUrl": shard.tar,
            "contentSize": f"{shard.bytes} B",
            "encodingFormat": "application/x-tar",
            "sha256": shard.sha256,
        }
        for shard in source.shards
    ]
    contained = [{"@id": shard.tar} for shard in source.shards]
    series = _file_set("series-records", "*.json", "application/json") | {"containedIn": contained}
    images = _file_set("image-files", "*.*.*", "image/*") | {"containedIn": contained}
    return _dataset(source, card, [*tars, series, images], _series_table())


def as_json(metadata: dict[str, Any]) -> bytes:
    return (json.dumps(metadata, indent=1, ensure_ascii=False) + "\n").encode()


def _dataset(
    source: PinnedRoot, card: DatasetCard, files: list[dict[str, Any]], records: dict[str, Any]
) -> dict[str, Any]:
    plan, series = source.root.plan, sum(shard.groups for shard in source.shards)
    images = series * plan.images_per_group
    marked = " Each file says so in its XMP metadata." if plan.marked else ""
    labels = f", label set {source.label_set.digest[:DIGITS]}" if source.label_set else ""
    description = (
        f"{images:,} synthetic images between {len(source.class_names)} classes, in {series:,} "
        f"series, with soft labels.{marked} Plan {plan.digest[:DIGITS]}, {source.index}{labels}."
    )
    values = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": card.name or f"semix-{plan.digest[:DIGITS]}",
        "description": card.description or description,
        "license": card.license,
        "creator": [{"@type": "sc:Organization", "name": name} for name in card.creators],
        "url": card.url,
        "version": card.version,
        "datePublished": card.date_published and card.date_published.isoformat(),
        "citeAs": card.cite_as,
        "keywords": ["synthetic", "soft labels", "calibration", "semix"],
        "prov:wasDerivedFrom": list(_entities(source, card)),
        "prov:wasGeneratedBy": _activities(source),
        "rai:hasSyntheticData": True,
        "rai:dataLimitations": [LIMITATION, *_audited(source, series), *card.limitations],
        "rai:dataBiases": [BIAS, *card.biases],
        "rai:personalSensitiveInformation": card.personal_sensitive_information,
        "rai:dataUseCases": list(card.use_cases),
        "rai:dataSocialImpact": card.social_impact,
        "rai:machineAnnotationTools": [f"CLIP: {_name(models_of(source)['annotation'])}"],
        "distribution": files,
        "recordSet": [_splits(), _classes(source), records],
    }
    return {key: value for key, value in values.items() if value not in (None, [])}


def _audited(source: PinnedRoot, series: int) -> Iterator[str]:
    """What the newest audit of the index found; a sentence if there is none."""
    flags = newest_flags(source.root, source.index)
    if flags is None:
        yield "The series were not audited."
        return
    for flag in FLAGS:
        if groups := flags.flags.get(flag):
            yield f"{len(groups):,} of {series:,} series {FLAGGED[flag]} (audit: {flag})."
    if not any(flags.flags.values()):
        yield f"The audit flagged none of {series:,} series."


def _entities(source: PinnedRoot, card: DatasetCard) -> Iterator[dict[str, Any]]:
    """The real images and the models that the dataset was made from, without local folders."""
    plan = source.root.plan
    real = plan.config.get("real") or {}
    name = card.real_data or real.get("dataset") or Path(str(real.get("path") or "")).name
    name = name or str(real.get("name", "unknown"))
    yield {"@type": "prov:Entity", "prov:label": f"real images: {name}"}
    for role, identity in identities(models_of(source)):
        label = f"{role}: {_name(identity)}, licence {licence_of(identity)}"
        yield {"@type": "prov:Entity", "prov:label": label}


def models_of(source: PinnedRoot) -> dict[str, Any]:
    """Identities of the models behind images and labels; a label set has its own CLIP models."""
    models: dict[str, Any] = {**source.root.plan.models}
    return models | ({"annotation": source.label_set.record.encoders} if source.label_set else {})


def _activities(source: PinnedRoot) -> list[dict[str, Any]]:
    plan, labels = source.root.plan, source.label_set
    annotation = labels.record.annotation if labels else plan.config.get("annotation") or {}
    rule = annotation.get("rule", "projection")
    version = plan.versions.get("semix", "unknown")
    agent = {"@type": "prov:SoftwareAgent", "prov:label": f"semix {version}"}
    steps = (
        "generation: series of images, each from one noise, whose conditioning moves from class to "
        f"class (plan {plan.digest})",
        f"annotation: soft labels of CLIP features and class prototypes (rule {rule})",
    )
    return [
        {"@type": "prov:Activity", "prov:label": step, "prov:wasAssociatedWith": agent}
        for step in steps
    ]


def _name(identity: Any) -> str:
    """Name of a model; of one in a local folder, the folder's name alone."""
    model = str(identity.get("model", "unknown")).removeprefix("local-dir:")
    name = Path(model).name if identity.get("files") else model
    revision = identity.get("revision")
    return f"{name} at {revision}" if revision else name


def _file(folder: Path, name: str, encoding: str, within: str = "") -> dict[str, Any]:
    path = folder / name
    name = f"{within}/{name}" if within else name
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "@type": "cr:FileObject",
        "@id": name,
        "name": name,
        "contentUrl": name,
        "contentSize": f"{path.stat().st_size} B",
        "encodingFormat": encoding,
        "sha256": digest,
    }


def _file_set(name: str, includes: str, encoding: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileSet",
        "@id": name,
        "name": name,
        "includes": includes,
        "encodingFormat": encoding,
    }


def _image_sets(suffixes: Iterable[str]) -> list[dict[str, Any]]:
    types = {".webp": "image/webp", ".png": "image/png", ".jpg": "image/jpeg"}
    return [
        _file_set(f"{suffix[1:]}-files", f"*/*{suffix}", types[suffix])
        for suffix in suffixes
        if suffix in types
    ]


def _splits() -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": "splits",
        "name": "splits",
        "description": "Generated images are for training alone.",
        "dataType": "cr:Split",
        "key": {"@id": "splits/name"},
        "field": [_inline("splits/name", "sc:Text")],
        "data": [{"splits/name": "train"}],
    }


def _classes(source: PinnedRoot) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": "classes",
        "name": "classes",
        "description": "The classes, in the order of the labels.",
        "key": {"@id": "classes/index"},
        "field": [_inline("classes/index", "cr:Int64"), _inline("classes/name", "sc:Text")],
        "data": [
            {"classes/index": index, "classes/name": name}
            for index, name in enumerate(source.class_names)
        ],
    }


def _inline(name: str, kind: str) -> dict[str, Any]:
    return {"@type": "cr:Field", "@id": name, "name": name, "dataType": kind}


FILES = {"fileSet": {"@id": "parquet-files"}}
COLUMNS = {  # name: type, description
    "group": ("cr:Int64", "number of the series"),
    "position": ("cr:Int64", "of the image in its series"),
    "classes": ("cr:Int64", "indices of the mixed classes"),
    "names": ("sc:Text", "names of the mixed classes"),
    "mixture": ("cr:Float64", "weights of the classes in the generator's conditioning"),
    "alpha": ("cr:Float64", "weight of the first class in the conditioning"),
    "weight": ("cr:Float64", "position between the class prototypes by CLIP: 1 is the first"),
}
LISTS = ("classes", "names", "mixture")  # columns that hold lists


def _table(
    source: PinnedRoot, fields: list[dict[str, Any]], files: dict[str, Any], *, text: bool
) -> dict[str, Any]:
    """The record set of the images, whose fields are the columns of a table."""
    for field in fields:
        column = field["@id"].removeprefix("images/")
        field["source"] = {**files, "extract": {"column": column}}
        if column == "image":
            field["source"]["transform"] = {"jsonPath": "bytes"}
    lists = "; lists are JSON" if text else ""
    return {
        "@type": "cr:RecordSet",
        "@id": "images",
        "name": "images",
        "description": f"Images with soft labels over {len(source.class_names)} classes{lists}.",
        "field": fields,
    }


def _csv_fields() -> list[dict[str, Any]]:
    fields = [_field("file", "sc:Text", "path of the image")]
    for name, (kind, description) in COLUMNS.items():
        fields.append(_field(name, "sc:Text" if name in LISTS else kind, description))
    return [*fields, _field("label", "sc:Text", "soft label: pairs of class index and probability")]


def _parquet_fields(classes: int) -> list[dict[str, Any]]:
    fields = [_field("image", "sc:ImageObject", "the image file")]
    for name, (kind, description) in COLUMNS.items():
        shape = {"isArray": True, "arrayShape": "-1"} if name in LISTS else {}
        fields.append(_field(name, kind, description) | shape)
    soft = _field("label", "cr:Float32", "soft label: probability of each class")
    return [*fields, soft | {"isArray": True, "arrayShape": str(classes)}]


def _field(name: str, kind: str, description: str, table: str = "images") -> dict[str, Any]:
    name = f"{table}/{name}"
    return {
        "@type": "cr:Field",
        "@id": name,
        "name": name,
        "description": description,
        "dataType": kind,
    }


def _series_table() -> dict[str, Any]:
    """KEY.json, the record of a series, as text: mlcroissant parses no JSON within archives."""
    description = (
        "JSON: classes and names that are mixed, alphas (weight of the first class in the "
        "conditioning), weights (position between the class prototypes by CLIP) and labels (soft "
        "label: pairs of class index and probability), with one entry per image."
    )
    field = _field("record", "sc:Text", description, "series")
    field["source"] = {
        "fileSet": {"@id": "series-records"},
        "extract": {"fileProperty": "content"},
    }
    return {
        "@type": "cr:RecordSet",
        "@id": "series",
        "name": "series",
        "description": "One series; its images are KEY.00.webp, KEY.01.webp, ... beside KEY.json.",
        "field": [field],
    }
