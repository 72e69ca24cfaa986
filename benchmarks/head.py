"""C7: a head on features made once, against the frozen network inside the loop of every epoch."""

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import Result, interleaved, ratio
from semix.calib.batches import Batches
from semix.calib.config import MaCCalConfig, TrainConfig
from semix.calib.heads import (
    MaskedBottleneckHead,
    SparsityController,
    build_head,
)
from semix.calib.network import Network
from semix.calib.real_data import open_data
from semix.calib.real_images import InMemoryImages
from semix.calib.stage_two import HeadStage
from semix.calib.training_data import TrainingData
from semix.data.fingerprint import derived_seed
from semix.data.settings import load_settings

EPOCHS, SEED = 20, 0


def run() -> Result:
    result = Result("C7", f"MaC-Cal's head, {EPOCHS} epochs, no augmentation, process CPU seconds")
    settings = config(EPOCHS)
    data = open_data(settings)
    network = frozen_network(settings, data)
    accelerator = Accelerator(cpu=True)
    heads: dict[str, dict[str, Tensor]] = {}
    base_accuracy = accuracy(network, data)  # stage one reports it to the head stage

    def cached() -> None:
        stage = HeadStage(settings, data, network=network, seed=SEED, accelerator=accelerator)
        for epoch in range(EPOCHS):
            stage.train_epoch(epoch)
        heads["cached"] = stage.head.state_dict()

    def in_the_loop() -> None:
        head = train_in_loop(settings, data, network, base_accuracy=base_accuracy, epochs=EPOCHS)
        heads["in the loop"] = head.state_dict()

    def one_pass() -> None:
        with torch.no_grad():
            for images in train_images(data).split(128):
                network.features(images)

    seconds = interleaved({"loop": in_the_loop, "cached": cached, "one pass": one_pass}, repeats=3)
    speedup = ratio(seconds["loop"], seconds["cached"])
    result.at_least("ratio to the network inside the loop", speedup["ratio"], 0.8 * EPOCHS)
    result.at_most("largest difference of a weight", difference(heads), 1e-5)
    over_one_pass = ratio(seconds["cached"], seconds["one pass"])["ratio"]
    result.figures |= {
        "images": len(data.images("train")),
        "ratio": speedup,
        "cpu_seconds": seconds,
        "cached over one pass through the network": over_one_pass,
    }
    return result


def config(epochs: int) -> TrainConfig:
    values = {
        "name": "head",
        "real": {"name": "digits", "train_per_class": 50, "validation_per_class": 10},
        "model": {"name": "resnet32", "width": 16},
        "augment": {"shift": 0},
        "head": {"epochs": epochs, "batch_size": 125, "extra_pass": False},
    }
    return load_settings(TrainConfig, values)


def train_images(data: TrainingData) -> Tensor:
    """uint8 [N, S, S, 3]; small data is in memory."""
    images = data.images("train")
    assert isinstance(images, InMemoryImages)
    return images.tensor


def frozen_network(settings: TrainConfig, data: TrainingData) -> Network:
    """A network with random weights and the images' statistics in its batch norms."""
    torch.manual_seed(SEED)
    network = Network(settings, data.num_classes)
    network.normalise.fit(data.train_histogram)
    with torch.no_grad():
        network.train()(train_images(data)[:500])
    return network.eval().requires_grad_(False)


@torch.no_grad()
def accuracy(network: Network, data: TrainingData) -> float:
    predicted = [network(images)[0].argmax(1) for images in train_images(data).split(500)]
    return (torch.cat(predicted) == data.train_targets).float().mean().item()


def train_in_loop(
    settings: TrainConfig,
    data: TrainingData,
    network: Network,
    *,
    base_accuracy: float,
    epochs: int,
    device: str = "cpu",
) -> MaskedBottleneckHead:
    """The stage without cached features: each batch passes the network, then trains the head."""
    assert isinstance(settings.head, MaCCalConfig)
    torch.manual_seed(derived_seed(SEED, "head weights"))
    head = build_head(settings.head, network.num_features, data.num_classes).train().to(device)
    assert isinstance(head, MaskedBottleneckHead)
    controller = SparsityController(
        settings.head,
        base_accuracy=base_accuracy,
        chance=1 / data.num_classes,
        seed=derived_seed(SEED, "masks"),
    )
    images = len(data.train_targets)
    recipe = settings.head.optimiser_for(images)
    optimiser = torch.optim.SGD(
        head.parameters(),
        lr=recipe.learning_rate,
        momentum=0.9,
        weight_decay=recipe.weight_decay,
    )
    batches = Batches(
        data.images("train"),
        data.train_targets,
        batch_size=settings.head.batch_size_for(images),
        augment=settings.augment,
        device=torch.device(device),
    )
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derived_seed(SEED, "head", epoch))
        head.start_epoch(controller.p, controller.generator)
        sums = torch.zeros(2, device=device)
        for batch in batches.epoch(generator):
            with torch.no_grad():
                features = network.features(batch.images)
            logits = head(features)
            functional.cross_entropy(logits, batch.targets).backward()
            head.after_backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 2.0)
            optimiser.step()
            optimiser.zero_grad()
            head.after_step()
            confidences, predicted = logits.detach().softmax(1).max(1)
            sums += torch.stack([(predicted == batch.targets).sum(), confidences.sum()])
        correct, confidence = (sums / len(batches) / batches.batch_size).tolist()
        controller.end_epoch(accuracy=correct, confidence=confidence)
    return head


def difference(heads: dict[str, dict[str, Tensor]]) -> float:
    first, second = heads.values()
    assert first.keys() == second.keys()
    return max((first[name].float() - second[name].float()).abs().max().item() for name in first)
