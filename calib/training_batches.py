"""The batches of each stage, as its settings and this process's share make them."""

from accelerate import Accelerator

from calib.batches import Batches
from calib.config import TrainConfig
from calib.training_data import TrainingData


def base_batches(config: TrainConfig, data: TrainingData, accelerator: Accelerator) -> Batches:
    """Real images of stage one, with mixed ones beside them where settings ask for them."""
    return Batches(
        data.train_images,
        data.train_targets,
        batch_size=config.batch_size,
        augment=config.augment,
        device=accelerator.device,
        mixed=data.mixed,
        class_matched=config.mixed is not None and config.mixed.class_matched,
        per_real=config.mixed.per_real if config.mixed is not None else 2.0,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )


def head_batches(config: TrainConfig, data: TrainingData, accelerator: Accelerator) -> Batches:
    """Real images alone, of stage two."""
    assert config.head is not None
    return Batches(
        data.train_images,
        data.train_targets,
        batch_size=config.head.batch_size,
        augment=config.augment,
        device=accelerator.device,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )
