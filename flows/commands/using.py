"""semix predict, export-classifier."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from semix.data.errors import InputError
from semix.flows import parameters as p
from semix.flows.terminal import emit

Calibrator = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="one that was fitted, or plain; default: lowest validation NLL"
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="one seed; default: the mean of all", rich_help_panel=p.MORE_PANEL
    ),
]
Stage = Annotated[
    Literal["", "base", "head"],
    typer.Option(
        metavar="STAGE", help="base or head; default: the last", rich_help_panel=p.MORE_PANEL
    ),
]


def predict(
    run: p.TrainedRun,
    pictures: Annotated[
        list[str],
        typer.Argument(
            metavar="PICTURES", help="files, folders, patterns; - reads paths from stdin"
        ),
    ],
    to: Annotated[
        str, typer.Option(metavar="FILE", help="a .csv or .parquet file; -: standard output")
    ] = "-",
    calibrator: Calibrator = "",
    seed: Seed = None,
    stage: Stage = "",
    top: Annotated[int, typer.Option(metavar="K", min=1, help="the most likely classes")] = 1,
    coverage: Annotated[
        float | None, typer.Option(metavar="RATE", help="conformal sets that hold the true class")
    ] = None,
    least: Annotated[
        float | None, typer.Option(metavar="P", help="abstain below this probability")
    ] = None,
    ood: Annotated[
        bool,
        typer.Option(
            "--ood", help="entropy in nats, as an OOD score", rich_help_panel=p.MORE_PANEL
        ),
    ] = False,
    skip_bad: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="pictures that may fail", rich_help_panel=p.MORE_PANEL
        ),
    ] = 0,
    device: p.Device = "auto",
) -> None:
    """Predict classes, with calibrated probabilities.

    Example:
      semix predict runs/csm photos --coverage 0.9 --to p.csv
    """
    from semix.flows.predict import Columns, predict_files

    predict_files(
        run,
        pictures,
        Columns(top, coverage, least, ood),
        to=to,
        seed=seed,
        stage=stage or None,
        calibrator=calibrator or None,
        skip_bad=skip_bad,
        device=device,
    )


def export_classifier(
    run: p.TrainedRun,
    to: Annotated[Path, typer.Option(metavar="DIR", help="folder to write")],
    format: Annotated[
        Literal["timm", "onnx", "pt2"],
        typer.Option(
            help="timm: weights for timm and transformers; onnx, pt2: pixels to probabilities"
        ),
    ] = "onnx",
    calibrator: Calibrator = "",
    seed: Seed = None,
    stage: Stage = "",
    license_name: Annotated[
        str, typer.Option("--license", metavar="SPDX", help="of the weights, for the card")
    ] = "",
    repository: p.Repository = "",
    dry_run: p.DryRun = False,
) -> None:
    """Write a classifier for other programs, with its card.

    Example:
      semix export-classifier runs/csm --to csm-onnx
    """
    if dry_run and not repository:
        raise InputError("--dry-run", dry_run, "goes with --push-to-hub OWNER/NAME")
    from semix.flows.export_classifier import export_classifier as export
    from semix.flows.hub import check_repository, push_to_hub

    if repository:
        check_repository(repository)
    files = export(
        run,
        to,
        format=format,
        seed=seed,
        stage=stage or None,
        calibrator=calibrator or None,
        license_name=license_name,
    )
    for path in files:
        emit(f"written: {path}")
    if repository:
        names = push_to_hub(to, repository, dry_run=dry_run)
        emit(f"{'would upload' if dry_run else 'uploaded'} to {repository}: {', '.join(names)}")
