"""The quickstart's page: a table of its methods, its mixed images, and its limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semix.calib.judge import Judge
from semix.calib.page import ComparedNoise, write_report
from semix.calib.results import load_methods
from semix.calib.run_folder import EVALUATION
from semix.calib.tables import summary_table
from semix.data.dataset import MixedDataset
from semix.data.files import read_json, write_json
from semix.data.fingerprint import file_digest
from semix.data.quality import end_points, endpoint_agreement
from semix.data.root import Root
from semix.data.splits import SPLITS
from semix.flows.quickstart import NOISE, Clock, real_digits

LIMITS = [
    "The generator and CLIP are small models, trained for a minute or two on the same training "
    "digits; they are neither Stable Diffusion nor OpenAI's CLIP.",
    "This is one split of one small dataset. On another, close methods can change places.",
    "LeNet was chosen because cross-entropy makes it overconfident; a ResNet-8 with batch "
    "normalisation is calibrated on these digits anyway, and mixing did not help it. Settings were "
    "compared with the test results of this split in view.",
]


def make_report(
    path: Path,
    *,
    roots: Mapping[str, Root],
    runs: Sequence[Path],
    clock: Clock,
) -> Path:
    """Write the report and the table, unless they show these runs already."""
    table_file = path.with_suffix(".json")
    evaluations = [file_digest(run / EVALUATION) for run in runs]
    if path.is_file() and table_file.is_file() and read_json(table_file)["runs"] == evaluations:
        return path
    with clock.step("report"):
        datasets = []
        for name, root in roots.items():
            mixed = MixedDataset(root.url)
            datasets.append(ComparedNoise(NOISE[name][0], mixed, measure_agreement(mixed, runs[0])))
        agreement, real = datasets[0].agreement, real_digits()
        facts = {
            "seconds": clock.seconds,
            "splits": {split: len(getattr(real, split)) for split in SPLITS},
            "limits": LIMITS,
        }
        write_report(
            path,
            runs=runs,
            mixed=datasets[0].dataset,
            agreement=agreement,
            facts=facts,
            title="semix quickstart",
            compared=datasets,
        )
        table = summary_table(load_methods(runs))
        write_json(table_file, {"runs": evaluations, "methods": table, "agreement": agreement})
    return path


def measure_agreement(mixed: MixedDataset, run: Path) -> dict[str, Any]:
    """How often a classifier trained on real digits sees the class of an unmixed image."""
    judge = Judge(run)
    group, position, intended = end_points(mixed.mixtures, mixed.classes)
    predicted = judge.classes(mixed.images[group, position])
    return {**endpoint_agreement(predicted, intended), "classifier": judge.name}
