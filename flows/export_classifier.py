"""Export a trained classifier, calibrated, with a model card."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from semix.calib.run_folder import EXPORTS
from semix.data.errors import InputError
from semix.data.files import read_json, write_atomically, write_json
from semix.data.installation import install_command
from semix.flows.paths import output_file

if TYPE_CHECKING:
    from semix.calib.classifier import CalibratedClassifier

Format = Literal["timm", "onnx", "pt2"]
README, CONFIG = "README.md", "config.json"
COMPARED = 100  # pictures that are read by timm, too


def export_classifier(
    run: str | Path,
    to: str | Path,
    *,
    format: Format,
    seed: int | None = None,
    stage: Literal["base", "head"] | None = None,
    calibrator: str | None = None,
    license_name: str = "",
) -> list[Path]:
    """Export a trained and measured classifier with its calibration.

    Args:
        to: a folder, which gets the model and its card.
        format: timm: weights and settings that timm and transformers load, with temperature or
            vector scaling in the last layer; onnx or pt2: the whole graph from pixels to
            probabilities, with any calibrator and with the mean over seeds.
        seed, stage, calibrator: as for `load_classifier`. For timm the calibrator is chosen among
            those that a last layer can hold.
        license_name: of the weights, as an identifier of SPDX; it goes into the card.
    Returns:
        The files.
    Raises:
        InputError: see `load_classifier`; a format that cannot hold the classifier; onnx is not
            installed.
    """
    folder, run_folder = Path(to), Path(run)
    if folder.exists():
        raise InputError("--to", folder, "exists; name a new folder, or remove it")
    output_file("--to", folder)
    if format == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        remedy = f"needs onnx and onnxscript; run {install_command('onnx')}"
        raise InputError("--format", format, remedy)
    from semix.calib.classifier import load_classifier  # torch takes seconds
    from semix.calib.model_card import model_card

    among: Sequence[str] = ()
    if format == "timm":
        from semix.calib.timm_export import FOLDED as among
    classifier = load_classifier(run, seed, stage, calibrator, among=among)
    with _new_folder(folder) as partial:
        difference = _write_model(classifier, partial, format=format, license_name=license_name)
        card = model_card(
            run_folder,
            classifier,
            format=format,
            folder=folder,
            license_name=license_name,
            difference=difference,
        )
        write_atomically(partial / README, card.encode())
    _note_export(classifier, run_folder, folder, format=format)
    return sorted(folder.iterdir())


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `folder` at the end of the block."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        partial = Path(name, folder.name)
        partial.mkdir()
        yield partial
        partial.rename(folder)


def _note_export(
    classifier: "CalibratedClassifier", run: Path, folder: Path, *, format: Format
) -> None:
    """Add an export to the run's `exports.json`, from which reports link its card."""
    path = run / EXPORTS
    earlier = read_json(path)["exports"] if path.is_file() else []
    place = str(folder.absolute())
    export = {
        "format": format,
        "folder": place,
        "calibrator": classifier.calibrator,
        "stage": classifier.stage,
        "seeds": len(classifier.members),
    }
    write_json(path, {"exports": [*(e for e in earlier if e["folder"] != place), export]})


def _write_model(
    classifier: "CalibratedClassifier", folder: Path, *, format: Format, license_name: str
) -> str:
    """Write the model; returns what the card says of reading by another library."""
    if format == "timm":
        from semix.calib.timm_export import export_timm, reading_difference

        export_timm(classifier, folder, license_name=license_name)
        return reading_difference(classifier, folder, images=COMPARED)
    from semix.calib.graph import export_onnx, export_pt2

    names = {"label_names": list(classifier.class_names), "image_size": classifier.image_size}
    write_json(folder / CONFIG, names)
    write: Callable[[CalibratedClassifier, Path], None] = (
        export_onnx if format == "onnx" else export_pt2
    )
    write(classifier, folder / f"model.{format}")
    return ""
