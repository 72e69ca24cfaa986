"""semix browse."""

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Url, chosen
from flows.terminal import emit


def browse(
    url: Url,
    out: Annotated[Path, typer.Option(help="the picture to write, PNG or WebP")] = Path(
        "series.png"
    ),
    groups: Annotated[str, typer.Option(help="as in 3,7-9; default: some of all pairs")] = "",
) -> None:
    """A contact sheet of series with alpha, CLIP weight and soft label."""
    from data.contact_sheet import contact_sheet
    from data.root import Root
    from data.series import read_series, some_of_all_pairs

    root = Root(url)
    wanted = sorted(chosen(groups)) if groups else some_of_all_pairs(root)
    contact_sheet(read_series(root, wanted)).save(out)
    emit(str(out))
