"""A contact sheet of a few series, inside the artifact itself."""

import base64
import io

from PIL import Image
from prefect.artifacts import create_markdown_artifact

from data.printable import markdown_text
from data.root import Root
from data.series import contact_sheet, read_series, some_of_all_pairs
from flows.artifacts.publishing import only_shown

ROWS = 4  # series on the sheet
MOST_READ = 64_000_000  # bytes of shards that are read for it
MOST_SIDE = 1600  # pixels
MOST_TEXT = 140_000  # characters of the picture, in Prefect's database


def series_sheet(root: Root, *, key: str) -> None:
    """Show a series each of some shards, if there are any.

    Prefect's pages show a picture in Markdown as it is; an image artifact prints the text of its
    address as well, which here is the picture.
    """
    with only_shown():
        groups = _some_groups(root)
        if not groups:
            return
        picture = as_text(contact_sheet(read_series(root, groups)))
        text = (
            f"![series {', '.join(map(str, groups))}]({picture})\n\n"
            "Each row is a series; below an image its alpha and CLIP weight, and its soft label "
            f"as a bar. More of them: semix browse {markdown_text(root.url)}"
        )
        create_markdown_artifact(text, key=f"{key}-series", description="a few of the series")


def as_text(sheet: Image.Image) -> str:
    """A picture as a data URL of at most MOST_TEXT characters, smaller if it must be."""
    sheet = sheet.copy()
    sheet.thumbnail((MOST_SIDE, MOST_SIDE))
    while True:
        file = io.BytesIO()
        sheet.save(file, "WEBP", quality=80)
        text = "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
        if len(text) <= MOST_TEXT:
            return text
        sheet.thumbnail((sheet.width * 7 // 10, sheet.height))


def _some_groups(root: Root) -> list[int]:
    """Series of other classes each, as many as may be read."""
    groups: list[int] = []
    read = 0
    for group in some_of_all_pairs(root, ROWS) if root.done() else []:
        record = root.record(root.layout.shard_of(group))
        if record is None:  # discarded since
            continue
        read += record.bytes
        if groups and read > MOST_READ:
            break
        groups.append(group)
    return groups
