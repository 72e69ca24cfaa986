"""One self-contained HTML page on the mixed images, the training runs and their results."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from semix.calib.figures import (
    MIN_COUNT,
    Picture,
    coverage_picture,
    pooled_bins,
    reliability_picture,
    rounds_picture,
    weight_figure,
)
from semix.calib.results import (
    MethodResult,
    by_data,
    load_evaluation,
    load_methods,
    merge_versions,
)
from semix.calib.run_folder import (
    CONFIG,
    EXPORTS,
    LINEAGE,
    Evaluation,
    read_data,
    report_damage,
)
from semix.calib.shown_measures import ACCURACY, ECE, Summary, measures_in
from semix.calib.tables import (
    DASH,
    MAIN_KINDS,
    TableRow,
    comparison,
    details,
    differences,
)
from semix.calib.verdicts import (
    Verdict,
    enumerate_words,
    first_sentence,
    headlines,
    spread,
    verdicts,
)
from semix.data.contact_sheet import spread_over_sets
from semix.data.dataset import MixedDataset, Sample
from semix.data.files import read_json, write_atomically
from semix.data.formats import SeriesRecord
from semix.data.lineage import Lineage, describe_source
from semix.data.pace import duration
from semix.data.pages import SeriesFigure, fixed, page_environment, series_figure
from semix.data.quality import SeriesQuality, series_quality, spearman, weight_curve

FACTS_WITH_SECTION = ("seconds", "splits", "versions", "limits")  # on the page
RHO = "\N{GREEK SMALL LETTER RHO}"

AgreementFigures = Mapping[str, Any]  # an `Agreement`, and the keys that `write_report` lists
ReportFacts = Mapping[str, Any]  # facts that the caller shows; see `write_report`


@dataclass(frozen=True)
class ComparedNoise:
    """One of several mixed datasets that differ in their noise, and a judge's agreement with it."""

    label: str
    dataset: MixedDataset
    agreement: AgreementFigures


def write_report(
    path: Path,
    *,
    runs: Sequence[Path],
    mixed: MixedDataset | str | None,
    agreement: AgreementFigures | None,
    facts: ReportFacts,
    title: str,
    compared: Sequence[ComparedNoise] = (),
    rounds: Mapping[str, Sequence[MethodResult]] | None = None,
) -> None:
    """Write the HTML page, which has no script and loads no other file.

    Args:
        runs: finished run folders; the first method on each dataset is its baseline.
        mixed: the mixed dataset, or the URL of its root; None for runs without one.
        agreement: the result of `endpoint_agreement`, or None if it was not measured. Optional
            further keys: "classifier", a sentence on the judge; "label_gap" and "alpha_gap", the
            results of `label_gap` for the stored labels and for `mixture_labels`.
        facts: further facts. These keys have their own sections: "seconds" {stage: s}, "splits"
            {name: number of images}, "versions" {library: version}, "limits" [a sentence on what
            the numbers do not show]. Of any other key, a mapping becomes a section, any other value
            a line.
        compared: mixed datasets that differ in their noise, shown side by side.
        rounds: of a loop, the method of each round by how its images were added.
    Raises:
        InputError: a run is not evaluated, its logits are missing, two runs have the same name, or
            the mixed dataset cannot be read.
    """
    # A few series are shown: they are read where they are, instead of decoding all of them.
    dataset = MixedDataset(mixed, memory_limit=0) if isinstance(mixed, str) else mixed
    methods = load_methods(runs)
    groups = [_dataset_section(group) for group in by_data(methods)]
    environment = page_environment(Path(__file__).parent)
    environment.filters |= {"duration": duration, "words": enumerate_words}
    text = environment.get_template("page.html.j2").render(
        title=title,
        script=(Path(__file__).parent / "page.js").read_text(),
        warnings=[text for run in runs for text in load_evaluation(run).get("warnings", ())],
        methods=methods,
        measures=measures_in("page"),
        groups=groups,
        details=details(methods),
        diagrams=[[_diagram(method, kind) for kind in MAIN_KINDS] for method in methods],
        mixed=None if dataset is None else _mixed_section(dataset),
        agreement=agreement,
        noises=noise_rows(compared),
        rounds=None if rounds is None else rounds_picture(rounds),
        facts=provenance(runs, facts),
        bins=methods[0].bins,
        few=MIN_COUNT,
    )
    write_atomically(path, text.encode())


# Methods in sentences and diagrams


@dataclass(frozen=True)
class DatasetSection:
    """The methods on one real dataset; only these can be compared."""

    dataset: str
    baseline: str
    first: str
    verdicts: list[Verdict]
    headlines: list[str]
    comparison: list[list[TableRow]]
    differences: list[list[TableRow]]
    coverage: Picture
    chance: dict[str, str]  # standard error of accuracy that the size of the test set implies


def _dataset_section(methods: Sequence[MethodResult]) -> DatasetSection:
    baseline, lines = methods[0], verdicts(methods)
    return DatasetSection(
        baseline.dataset,
        baseline.label,
        first_sentence(methods, lines),
        lines,
        headlines(methods),
        comparison(methods),
        differences(methods),
        coverage_picture(methods),
        _sampling_error(baseline),
    )


def _sampling_error(method: MethodResult) -> dict[str, str]:
    """Standard error of a method's accuracy that the size of the test set implies, as text."""
    images = next(iter(method.seeds.values())).images("test")
    accuracy = method.summary(ACCURACY).mean
    error = math.sqrt(accuracy * (1 - accuracy) / images)
    return {
        "images": f"{images:,}",
        "accuracy": ACCURACY.text(accuracy),
        "error": f"{100 * error:.1f}",
    }


@dataclass(frozen=True)
class Diagram:
    """One reliability diagram with its texts."""

    label: str
    kind: str
    ece: str
    alt: str
    picture: Picture


def _diagram(method: MethodResult, kind: str) -> Diagram:
    bins = pooled_bins(method, kind)
    ece = spread(method, ECE, kind)
    last_bin = bins.confidence.numpy()[-1], bins.accuracy.numpy()[-1]
    alt = (
        f"Reliability diagram of {method.label}, {MAIN_KINDS[kind]}: mean ECE {ece}; in the most "
        f"confident bin, confidence {last_bin[0]:.3f} and accuracy {last_bin[1]:.3f}."
    )
    return Diagram(method.label, MAIN_KINDS[kind], ece, alt, reliability_picture(bins))


# Mixed images


@dataclass(frozen=True)
class MixedSection:
    """The mixed dataset as shown on the page."""

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
    sheet: list[SeriesFigure]


def _mixed_section(mixed: MixedDataset) -> MixedSection:
    curve = weight_curve(mixed.alphas, mixed.weights)
    return MixedSection(
        url=mixed.url,
        index=mixed.index_name,
        digest=mixed.digest,
        groups=len(mixed),
        images=mixed.alphas.numel(),
        pairs=len(mixed.classes.unique(dim=0)),
        quality=series_quality(mixed.alphas, mixed.weights),
        alphas=curve.alphas.tolist(),
        means=curve.mean.tolist(),
        curve=weight_figure(curve),
        sheet=contact_sheet(mixed),
    )


def contact_sheet(mixed: MixedDataset, count: int = 12) -> list[SeriesFigure]:
    """Series spread evenly over the class pairs, then the one whose weights follow alpha least.

    They are selected by position and not by their images, so that they represent the dataset.
    """
    rho = spearman(mixed.alphas, mixed.weights)
    worst = int(rho.argmin())
    _, pairs = np.unique(mixed.classes.numpy(), axis=0, return_inverse=True)
    selected = [group for group in spread_over_sets(pairs, count - 1) if group != worst]
    notes = {group: f"{RHO} {fixed(float(rho[group]))}" for group in selected}
    notes[worst] = f"least ordered of all, {RHO} {fixed(float(rho[worst]))}"
    records = mixed.records(list(notes))
    return [
        _series(record, mixed[group], note)
        for record, (group, note) in zip(records, notes.items(), strict=True)
    ]


def _series(record: SeriesRecord, series: Sample, note: str) -> SeriesFigure:
    labels = [[(k, float(label[k])) for k in record.classes] for label in series["labels"]]
    record = record.model_copy(update={"labels": labels})
    return series_figure(record, series["images"].numpy(), note=note)


@dataclass(frozen=True)
class NoiseRow:
    """A row of the table that compares noises; texts of numbers are empty if not measured."""

    label: str
    strategy: str
    series: int
    images: int
    stability: str  # of the noises that the series use
    candidates: str  # stability of all candidates from which these were selected
    agreement: str
    median: float  # Spearman(alpha, weight)
    mean: float
    not_monotone: float


def noise_rows(compared: Sequence[ComparedNoise]) -> list[NoiseRow]:
    """Stability of each dataset's noises, and quality of its series."""
    return [_noise_row(noise_dataset) for noise_dataset in compared]


def _noise_row(noise_dataset: ComparedNoise) -> NoiseRow:
    noise = noise_dataset.dataset.noise
    quality = series_quality(noise_dataset.dataset.alphas, noise_dataset.dataset.weights)
    used, scored = (
        scores[~np.isnan(scores)].tolist() for scores in (noise.stability, noise.candidates)
    )
    return NoiseRow(
        label=noise_dataset.label,
        strategy=", ".join(sorted(noise.strategies)),
        series=len(noise.stability),
        images=noise_dataset.dataset.alphas.numel(),
        stability=_mean_and_deviation(used),
        candidates=f"{_mean_and_deviation(scored)} ({len(scored):,})" if scored else "",
        agreement=_agreement_text(noise_dataset.agreement),
        median=quality.median,
        mean=quality.mean,
        not_monotone=quality.not_monotone,
    )


def _mean_and_deviation(scores: Sequence[float]) -> str:
    """`0.812 ± 0.034`: mean and standard deviation."""
    if not scores:
        return ""
    summary = Summary.of(scores)
    return f"{summary.mean:.3f}" + ("" if summary.sd is None else f" ± {summary.sd:.3f}")


def _agreement_text(agreement: AgreementFigures) -> str:
    """`98.5 ± 0.9`: percent, with the standard error that the number of images implies.

    For the error, two agreements and two disagreements are added (Agresti and Coull 1998); without
    them it would be 0 at 100 %.
    """
    share, images = agreement["share"], agreement["images"] + 4
    adjusted = (share * agreement["images"] + 2) / images
    return f"{100 * share:.1f} ± {100 * math.sqrt(adjusted * (1 - adjusted) / images):.1f}"


# What was run


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds, as text."""

    name: str
    folder: str
    digest: str
    real: str  # digest of the real dataset
    mixed: str  # url, index and digest of the mixed dataset
    lineage: str  # number of its shards, and the plan and models behind them
    seconds: float  # of training and of the last evaluation
    config: str  # the whole resolved configuration, indented JSON
    exports: list[tuple[str, str]]  # what was exported, and the address of its card


@dataclass(frozen=True)
class Provenance:
    """Everything under "What was run"."""

    runs: list[RunRecord]
    settings: list[tuple[str, list[str]]]  # only those that differ between runs
    versions: dict[str, str]
    seconds: dict[str, float]  # by stage of the caller, which may include training
    training: dict[str, float]  # by run; runs may have been trained in parallel
    splits: dict[str, int]
    limits: list[str]
    other: dict[str, dict[str, str]]  # further facts by section


def provenance(runs: Sequence[Path], facts: ReportFacts) -> Provenance:
    """Collect what the run folders hold and the caller's facts.

    Args:
        facts: as for `write_report`.
    Raises:
        InputError: a run has no evaluation.json.
    """
    evaluations = [load_evaluation(Path(run)) for run in runs]
    configs = [read_json(Path(run) / CONFIG) for run in runs]
    records = [
        _record(Path(run), evaluation, config)
        for run, evaluation, config in zip(runs, evaluations, configs, strict=True)
    ]
    names = [record.name for record in records]
    records = [
        replace(r, name=f"{r.name} in {r.folder}") if names.count(r.name) > 1 else r
        for r in records
    ]
    return Provenance(
        runs=records,
        settings=_differing_settings([flatten(config) for config in configs]),
        versions=merge_versions([*(e["versions"] for e in evaluations), facts.get("versions", {})]),
        seconds=dict(facts.get("seconds", {})),
        training={record.name: record.seconds for record in records},
        splits=dict(facts.get("splits", {})),
        limits=list(facts.get("limits", [])),
        other=_sections({key: facts[key] for key in facts if key not in FACTS_WITH_SECTION}),
    )


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names: {"a": {"b": 1}} -> {"a.b": "1"}."""
    if isinstance(value, Mapping) and value:
        return {
            name: text
            for key, child in value.items()
            for name, text in flatten(child, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return {prefix: text}


def _record(run: Path, evaluation: Evaluation, config: Mapping[str, object]) -> RunRecord:
    data = read_data(run)
    mixed = data["mixed"]
    return RunRecord(
        name=evaluation["name"],
        folder=str(run),
        digest=evaluation["digest"],
        real=data["real"],
        mixed=f"{mixed['url']} {mixed['index']} {mixed['digest']}" if mixed else "none",
        lineage=_lineage(run),
        seconds=evaluation["seconds"],
        config=json.dumps(config, indent=2, ensure_ascii=False),
        exports=_exports(run),
    )


def _exports(run: Path) -> list[tuple[str, str]]:
    """What was exported of a run, and the addresses of the cards that are still there."""
    path = run / EXPORTS
    if not path.is_file():
        return []
    with report_damage(path):
        cards = [
            (f"{each['format']}, {each['calibrator']}", Path(each["folder"], "README.md"))
            for each in read_json(path)["exports"]
        ]
    return [(text, card.as_uri()) for text, card in cards if card.is_absolute() and card.is_file()]


def _lineage(run: Path) -> str:
    """The number of shards that a run used, and their source; empty without mixed images."""
    if not (run / LINEAGE).is_file():
        return ""
    lineage: Lineage = read_json(run / LINEAGE)
    return f"{len(lineage['shards']):,} shards; {describe_source(lineage)}"


def _differing_settings(configs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Settings that differ between runs, with their values; a dash where a run has none."""
    all_names = sorted({name for config in configs for name in config})
    names = [
        name for name in all_names if not any(other.startswith(f"{name}.") for other in all_names)
    ]
    rows = [(name, [config.get(name, DASH) for config in configs]) for name in names]
    return [(name, values) for name, values in rows if name != "name" and len(set(values)) > 1]


def _sections(facts: ReportFacts) -> dict[str, dict[str, str]]:
    scalars = {key: value for key, value in facts.items() if not isinstance(value, Mapping)}
    sections = {key: flatten(value) for key, value in facts.items() if key not in scalars}
    return ({"further facts": flatten(scalars)} if scalars else {}) | sections
