"""semix export."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Json, Url
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
    to: Annotated[Path, typer.Option(help="the folder or file to make", show_default=False)],
    format: Annotated[
        Format, typer.Option(help="image files and a table; one file; a `datasets` folder")
    ] = Format.folder,
    labels: Annotated[str, typer.Option(help="digest of a label set; default: the own")] = "",
    scale: Annotated[float | None, typer.Option(help="sharpen the raw weights anew")] = None,
    image_format: Annotated[
        Images, typer.Option(help="keep the stored bytes, or make PNG of them")
    ] = Images.keep,
    index: Annotated[str, typer.Option(help="as index/3.json; default: the newest")] = "",
    json: Json = False,
) -> None:
    """Images and soft labels for other programs; the root stays as it is."""
    from data.export.hugging_face import write_hugging_face
    from data.export.image_folder import write_image_folder
    from data.export.parquet import write_parquet
    from data.export.rows import open_source

    own_file("--to", to)
    source = open_source(
        url,
        index=index or None,
        labels=labels or None,
        scale=scale,
        image_format=image_format.value,
    )
    write = {
        Format.folder: write_image_folder,
        Format.parquet: write_parquet,
        Format.huggingface: write_hugging_face,
    }[format]
    images = write(source, to)
    facts = {"written": str(to), "format": format.value, "images": images}
    emit_facts(facts | {"index": source.index}, as_json=json)
