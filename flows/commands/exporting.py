"""semix export."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Index, Json, Labels, Url
from flows.errors import damage_named
from flows.places import own_file
from flows.terminal import emit_facts


class Format(StrEnum):
    folder = "folder"
    parquet = "parquet"
    huggingface = "huggingface"


class Images(StrEnum):
    keep = "keep"
    png = "png"


def export(
    url: Url,
    to: Annotated[Path, typer.Option(metavar="PATH", help="the folder or file to make")],
    format: Annotated[
        Format,
        typer.Option(
            metavar="FORMAT",
            help="folder: image files and a table; parquet: one file; huggingface: a `datasets` "
            "folder",
        ),
    ] = Format.folder,
    image_format: Annotated[
        Images, typer.Option(help="keep the stored bytes, or make PNG of them")
    ] = Images.keep,
    labels: Labels = "",
    scale: Annotated[
        float | None, typer.Option(metavar="SCALE", help="sharpen the raw weights anew")
    ] = None,
    index: Index = "",
    json: Json = False,
) -> None:
    """Write images and soft labels for other programs.

    Example:
      semix export /data/birds-mixed --to /data/birds-folder
    """
    from data.export import write_hugging_face, write_image_folder, write_parquet
    from data.pinned import Pinned
    from data.root import Root

    own_file("--to", to)
    source = Pinned(Root(url), index=index or None, labels=labels or None, scale=scale)
    write = {
        Format.folder: write_image_folder,
        Format.parquet: write_parquet,
        Format.huggingface: write_hugging_face,
    }[format]
    with damage_named(source.root.url):
        images = write(source, to, image_format=image_format.value)
    facts = {"written": str(to), "format": format.value, "images": images}
    emit_facts(facts | {"index": source.index}, as_json=json)
