"""The model card of an exported classifier: Markdown with the metadata that the Hub reads."""

import re
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from semix.calib.calibrators import CALIBRATORS, PLAIN
from semix.calib.classifier import CalibratedClassifier
from semix.calib.results import MethodResult, load_evaluation, methods_of
from semix.calib.run_folder import LINEAGE, read_data
from semix.calib.shown_measures import MEASURE, measures_in
from semix.calib.tables import Column, Table, as_markdown, means_table
from semix.data.files import read_json
from semix.data.lineage import Source, describe_source
from semix.data.printable import markdown_text

SHOWN = tuple(Column(MEASURE[key]) for key in ("accuracy", "ece", "adaptive_ece", "nll", "brier"))
FURTHER = {"shift": "On corrupted test images", "ood": "Against other data sets (OOD)"}
TAGS = ["image-classification", "calibration", "semix"]


def model_card(
    run: Path,
    classifier: CalibratedClassifier,
    *,
    format: str,
    folder: Path,
    license_name: str,
    difference: str = "",
) -> str:
    """The card as Markdown.

    Args:
        format: timm, onnx or pt2.
        folder: in which it is exported, for the examples.
        license_name: of the weights; "" says that none was given.
        difference: what reading by another library changes, a sentence.
    Raises:
        InputError: the run's evaluation.json is missing or damaged.
    """
    config = classifier.config
    record = read_data(run)
    head = {
        "license": license_name or "unknown",
        "library_name": "timm" if format == "timm" else "semix",
        "pipeline_tag": "image-classification",
        "tags": [*TAGS, *(["synthetic"] if record["mixed"] else [])],
    }
    stages = methods_of(run, load_evaluation(run))
    method = next(each for each in stages if each.stage == classifier.stage)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["text"] = lambda text: Markup(markdown_text(text))
    text: str = environment.get_template("model_card.md.j2").render(
        head=Markup(yaml.safe_dump(head, sort_keys=False)),
        config=config,
        classifier=classifier,
        format=format,
        folder=folder,
        difference=difference,
        side=classifier.image_size,
        classes=", ".join(classifier.class_names),
        real=Path(str(config.real.path or config.real.name)).name,
        record=record,
        source=_source(run),
        images=next(iter(method.seeds.values())).images("test"),
        bins=method.bins,
        seeds=len(method.seeds),
        test=_markdown(means_table("", "", SHOWN, _rows(method, classifier.calibrator))),
        further=_further(method),
        license=license_name,
    )
    return text.rstrip() + "\n"


def _source(run: Path) -> str:
    """Where mixed images come from, without the folders of models on the author's machine."""
    if not (run / LINEAGE).is_file():
        return ""
    lineage: Source = read_json(run / LINEAGE)
    models = {role: re.sub(r"^(local-dir:)?/.*/", "", m) for role, m in lineage["models"].items()}
    return describe_source({**lineage, "models": models})


def _markdown(table: Table) -> Markup:
    return Markup(as_markdown(table))


def _rows(method: MethodResult, calibrator: str) -> list[tuple[str, MethodResult, str, str]]:
    labels = {
        PLAIN: "as trained",
        **{n: k.label.removeprefix("+ ") for n, k in CALIBRATORS.items()},
    }
    return [(labels[kind], method, kind, "test") for kind in dict.fromkeys((PLAIN, calibrator))]


def _further(method: MethodResult) -> list[tuple[str, Markup]]:
    tables = []
    for part, title in FURTHER.items():
        if method.has(PLAIN, part):
            columns = tuple(map(Column, measures_in("shift" if part == "shift" else "ood")))
            rows = [("as trained", method, PLAIN, part)]
            tables.append((title, _markdown(means_table("", "", columns, rows))))
    return tables
