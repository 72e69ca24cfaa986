"""Puts tables, figures and facts into one HTML page that needs nothing else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from calib.metrics import ReliabilityBins, reliability_bins
from calib.report.facets import facets
from calib.report.figures import FEW, Picture, reliability_figure, weight_figure
from calib.report.headline import enumerate_words, headlines, spread
from calib.report.methods import ACCURACY, ECE, KINDS, MEASURES, Method, load_methods
from calib.report.noise import Compared, noise_rows
from calib.report.provenance import duration, provenance
from calib.report.sheet import Series, contact_sheet
from calib.report.tables import KIND_LABELS, comparison, differences
from data.dataset import MixedDataset
from data.errors import InputError
from data.files import write_atomically
from data.pages import page_environment
from data.quality import Agreement, SeriesQuality, series_quality, weight_curve


@dataclass(frozen=True)
class Diagram:
    """One reliability diagram and the words beside it."""

    label: str
    kind: str
    ece: str
    alt: str
    picture: Picture


@dataclass(frozen=True)
class MixedPart:
    """What the page shows of the mixed dataset."""

    url: str
    index: str
    digest: str
    groups: int
    images: int
    pairs: int
    quality: SeriesQuality
    alphas: list[float]
    means: list[float]  # weight at each alpha, over all series
    curve: Picture
    sheet: list[Series]


def write_report(
    path: Path,
    *,
    runs: Sequence[Path],
    mixed: MixedDataset | str | None,
    agreement: Agreement | Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    title: str,
    compared: Sequence[Compared] = (),
) -> None:
    """Write one self-contained HTML page; no script, nothing loaded from elsewhere.

    Args:
        runs: finished run folders; the first method of the first run is the baseline.
        mixed: the mixed dataset, or the URL of its root; None for runs without.
        agreement: what `endpoint_agreement` returned, or None if it was not measured; may add
            "classifier", a sentence on who judged, and "label_gap" with "alpha_gap", what
            `label_gap` gave for the stored labels and for `mixture_labels`.
        facts: what else to show. Known keys: "seconds" {stage: s}, "splits" {name: images},
            "versions" {library: version}, "limits" [sentence on what the numbers do not show].
            Any other key becomes a section if it holds a mapping, else a line.
        compared: mixed datasets that differ in their noise, to be shown side by side.
    Raises:
        InputError: a run that is not evaluated, or whose logits are gone; two runs of one name;
            a mixed root that cannot be read.
    """
    dataset = MixedDataset(mixed) if isinstance(mixed, str) else mixed
    methods = load_methods(runs)
    first, *others = headlines(methods)
    environment = page_environment(Path(__file__).parent)
    environment.filters |= {"duration": duration, "words": enumerate_words}
    page = environment.get_template("page.html.j2")
    text = page.render(
        title=title,
        lede=first,
        more=others,
        methods=methods,
        measures=MEASURES,
        comparison=comparison(methods),
        differences=differences(methods),
        facets=facets(methods),
        diagrams=[[_diagram(method, kind) for kind in KINDS] for method in methods],
        mixed=None if dataset is None else _mixed_part(dataset),
        agreement=agreement,
        noises=noise_rows(compared),
        facts=provenance(runs, facts),
        accuracy_error=_accuracy_error(methods[0]),
        bins=methods[0].bins,
        few=FEW,
    )
    write_atomically(path, text.encode())


def _mixed_part(mixed: MixedDataset) -> MixedPart:
    curve = weight_curve(mixed.alphas, mixed.weights)
    return MixedPart(
        url=mixed.url,
        index=mixed.index_name,
        digest=mixed.digest,
        groups=len(mixed.groups),
        images=mixed.alphas.numel(),
        pairs=len(mixed.classes.unique(dim=0)),
        quality=series_quality(mixed.alphas, mixed.weights),
        alphas=curve.alphas.tolist(),
        means=curve.mean.tolist(),
        curve=weight_figure(curve),
        sheet=contact_sheet(mixed),
    )


def _diagram(method: Method, kind: str) -> Diagram:
    bins = pooled_bins(method, kind)
    ece = spread(method, ECE, kind)
    high = bins.confidence.numpy()[-1], bins.accuracy.numpy()[-1]
    alt = (
        f"Reliability diagram of {method.label}, {KIND_LABELS[kind]}: mean ECE {ece}; in the most "
        f"confident bin, confidence {high[0]:.3f} and accuracy {high[1]:.3f}."
    )
    return Diagram(method.label, KIND_LABELS[kind], ece, alt, reliability_figure(bins))


def pooled_bins(method: Method, kind: str) -> ReliabilityBins:
    """Reliability bins over the test predictions of all seeds together.

    Raises:
        InputError: a logits file is gone.
    """
    logits, targets = [], []
    for row in method.rows:
        tensors = load_file(_logits_path(method, row))
        temperature = row["temperature"] if kind == "scaled" else 1.0
        logits.append(tensors["test_logits"] / temperature)
        targets.append(tensors["test_targets"])
    return reliability_bins(torch.cat(logits), torch.cat(targets), bins=method.bins)


def _logits_path(method: Method, row: Mapping[str, Any]) -> Path:
    path = method.run / row["logits"]
    if not path.is_file():
        raise InputError("logits", path, f"not there; run `semix evaluate {method.run}` again")
    return path


def _accuracy_error(method: Method) -> dict[str, str]:
    """Standard error of the first method's accuracy that the size of the test set alone gives."""
    images = len(load_file(_logits_path(method, method.rows[0]))["test_targets"])
    accuracy, _ = method.summary(ACCURACY, "plain")
    error = math.sqrt(accuracy * (1 - accuracy) / images)
    return {
        "images": f"{images:,}",
        "accuracy": ACCURACY.text(accuracy),
        "error": f"{100 * error:.1f}",
    }
