"""Export of a mixed dataset: its files, their Croissant metadata, signatures, and the upload."""

from pathlib import Path
from typing import Any, Literal

from semix.data.croissant import CROISSANT, DatasetCard, as_json, index_metadata, missing_fields
from semix.data.errors import InputError
from semix.data.export import (
    ImageFormat,
    metadata_of,
    write_hugging_face,
    write_image_folder,
    write_parquet,
)
from semix.data.imagefolder import check_outside_images
from semix.data.pinned import PinnedRoot
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.signing import signing
from semix.flows.failures import translate_damage
from semix.flows.hub import OPTION, check_repository, push_to_hub
from semix.flows.paths import output_file

Format = Literal["folder", "parquet", "huggingface", "croissant"]
WRITERS = {
    "folder": write_image_folder,
    "parquet": write_parquet,
    "huggingface": write_hugging_face,
}


def export(
    url: str,
    to: Path | None,
    *,
    format: Format,
    image_format: ImageFormat = "keep",
    labels: str | None = None,
    scale: float | None = None,
    index: str | None = None,
    sign: Path | None = None,
    card: Path | None = None,
    repository: str = "",
    dry_run: bool = False,
) -> dict[str, Any]:
    """Export an index of a root; the facts that the command shows.

    Args:
        to: the folder to write; None for croissant, which writes croissant.json into the root.
        sign: a PEM file, for `ImageSigner`.
        card: a YAML file, for `DatasetCard`.
        repository: of the Hugging Face Hub, to which the folder is uploaded; with `dry_run` its
            files are only listed.
    Raises:
        InputError: options that do not go together, and as what they are for.
    """
    _check_options(format, to, repository, dry_run, own_labels=labels is None and scale is None)
    _check_images(format, sign=sign, image_format=image_format)
    stated = DatasetCard() if card is None else load_settings(DatasetCard, card)
    if repository:
        check_repository(repository)
    root = Root(url)
    if to is not None:
        output_file("--to", to)
        real = root.plan.config.get("real", {})
        pictures = real.get("path") if real.get("name") == "imagefolder" else None
        check_outside_images(pictures, to, field="--to")
    with translate_damage(root.url):
        source = PinnedRoot(root, index=index, labels=labels, scale=scale)
        if format == "croissant":
            root.store.put(CROISSANT, as_json(index_metadata(source, stated)))
            written: dict[str, Any] = {"written": f"{root.url}/{CROISSANT}", "format": format}
        else:
            assert to is not None  # `_check_options`
            with signing(sign) as signer:
                images = WRITERS[format](
                    source, to, image_format=image_format, sign=signer, card=stated
                )
            written = {"written": str(to), "format": format, "images": images}
            if format == "parquet":
                written["metadata"] = str(metadata_of(to))
    facts = {**written, "index": source.index, "missing": missing_fields(stated)}
    if repository:
        assert to is not None
        names = push_to_hub(to, repository, dry_run=dry_run, kind="dataset")
        facts |= {"repository": repository, "dry_run": dry_run, "files": names}
    return facts


def _check_options(
    format: Format, to: Path | None, repository: str, dry_run: bool, *, own_labels: bool
) -> None:
    if format == "croissant":
        if to is not None:
            remedy = f"{CROISSANT} is written into the root; leave the option out"
            raise InputError("--to", to, remedy)
        if not own_labels:
            remedy = "describes the shards as they are; leave --labels and --scale out"
            raise InputError("--format", format, remedy)
    elif to is None:
        raise InputError("--to", "nothing", "name the folder to write")
    if repository and format != "huggingface":
        raise InputError(OPTION, repository, "goes with --format huggingface")
    if dry_run and not repository:
        raise InputError("--dry-run", dry_run, "goes with --push-to-hub OWNER/NAME")


def _check_images(format: Format, *, sign: Path | None, image_format: ImageFormat) -> None:
    if format != "croissant":
        return
    remedy = "writes no image; leave --sign and --image-format out"
    if sign is not None or image_format != "keep":
        raise InputError("--format", format, remedy)
