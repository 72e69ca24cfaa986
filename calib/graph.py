"""A calibrated classifier as one graph, from pixels to probabilities, in formats without semix."""

from pathlib import Path

import torch
from torch import Tensor, nn

from semix.calib.classifier import CalibratedClassifier
from semix.data.files import published

INPUT, OUTPUT = "images", "probabilities"
EXAMPLES = 2  # a batch of one would be taken for a constant


class ClassifierGraph(nn.Module):
    """Images, uint8 [N, S, S, 3], to calibrated probabilities, float32 [N, K].

    Normalisation, networks and calibrators of all seeds are inside; calibrators compute in float32,
    where semix itself computes in float64.
    """

    def __init__(self, classifier: CalibratedClassifier) -> None:
        super().__init__()
        self.networks = classifier.networks.cpu().float()
        fitted = [member.fitted.get(classifier.calibrator) for member in classifier.members]
        self.calibrators = [each and each.to(torch.float32) for each in fitted]

    def forward(self, images: Tensor) -> Tensor:
        each = []
        for network, calibrator in zip(self.networks, self.calibrators, strict=True):
            logits = network(images)
            each.append((logits if calibrator is None else calibrator.transform(logits)).softmax(1))
        return torch.stack(each).mean(0) if len(each) > 1 else each[0]


def example_of(classifier: CalibratedClassifier) -> Tensor:
    """Images with which a graph is traced."""
    side = classifier.image_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (EXAMPLES, side, side, 3), dtype=torch.uint8, generator=generator)


def export_pt2(classifier: CalibratedClassifier, path: Path) -> None:
    """Write the graph for `torch.export.load(path).module()`, with any number of images."""
    batch = torch.export.Dim("batch")
    graph = ClassifierGraph(classifier).eval()
    program = torch.export.export(
        graph, (example_of(classifier),), dynamic_shapes={INPUT: {0: batch}}
    )
    with published(path) as partial, partial.open("wb") as file:
        torch.export.save(program, file)


def export_onnx(classifier: CalibratedClassifier, path: Path) -> None:
    """Write the graph as ONNX, with any number of images; weights are in the same file."""
    graph = ClassifierGraph(classifier).eval()
    program = torch.onnx.export(
        graph,
        (example_of(classifier),),
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes={INPUT: {0: torch.export.Dim("batch")}},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    assert program is not None
    with published(path) as partial:
        program.save(partial)
