"""The real and mixed images of a run, opened and checked."""

from pathlib import Path

import torch

from semix.calib.config import MixedConfig, TrainConfig
from semix.calib.config.model import TimmConfig
from semix.calib.run_folder import MixedPin
from semix.calib.series_choice import choose_series
from semix.calib.training_data import TrainingData, check_overlap
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.fingerprint import file_digest
from semix.data.real import load_real
from semix.data.splits import RealDataset

GIB = 2**30
UNPINNED = MixedPin()


def open_data(
    config: TrainConfig,
    *,
    pin: MixedPin = UNPINNED,
    weights_digest: str | None = None,
    compare_splits: bool = True,
) -> TrainingData:
    """Open the data that the settings name.

    Args:
        pin: index of the mixed dataset to use if the settings name none, and number of its files
            of flags to read.
        weights_digest: digest of the pretrained weights, if it is known; None reads their file.
        compare_splits: search for images that two splits share. This decodes all images.
            Training images that fit in memory are kept; all others are decoded again when used.
    Raises:
        InputError: as `load_real`, `MixedDataset` and `check_overlap`; or the mixed images have
            another size, other classes or invalid labels, or no mixed series exists for some class.
    """
    real = load_real(config.real)
    side = config.real.image_size
    mixed = None if config.mixed is None else _open_mixed(config.mixed, real, pin, side=side)
    path = config.model.weights if isinstance(config.model, TimmConfig) else None
    if path is not None and weights_digest is None:
        weights_digest = file_digest(Path(path))
    data = TrainingData(
        real,
        mixed,
        side,
        memory_limit=int(config.real_memory_gib * GIB),
        workers=config.real_workers,
        weights_digest=weights_digest,
    )
    if compare_splits:
        check_overlap(data, allowed=config.real.allow_overlap)
    return data


def _open_mixed(
    config: MixedConfig, real: RealDataset, pin: MixedPin, *, side: int
) -> MixedDataset:
    mixed = _read_mixed(config, pin, side)
    if mixed.class_names != real.class_names:
        mixed_names, real_names = (", ".join(dataset.class_names) for dataset in (mixed, real))
        remedy = f"its classes are {mixed_names}; the real data's are {real_names}"
        raise InputError("mixed.url", config.url, remedy)
    if config.choose is not None:
        mixed.draw_only(choose_series(mixed, config.choose, image_size=side))
    if config.class_matched:
        try:
            mixed.check_groups_exist(torch.from_numpy(real.train.targets))
        except InputError as error:
            raise _name_setting(error) from None
    return mixed


def _read_mixed(config: MixedConfig, pin: MixedPin, side: int) -> MixedDataset:
    try:
        return MixedDataset(
            config.url,
            index=config.index or pin.index,
            scale=config.scale,
            rule=config.rule,
            labels=config.labels,
            exclude=config.exclude,
            flags=pin.flags,
            side=side,
            memory_limit=int(config.memory_gib * GIB),
            cache_limit=int(config.cache_gib * GIB),
        )
    except InputError as error:
        raise _name_setting(error) from None
    except ValueError as error:  # its message names a damaged shard or its labels
        raise InputError("mixed.url", config.url, str(error)) from None


def _name_setting(error: InputError) -> InputError:
    """The same error with the setting `mixed.X` in place of the argument `X`."""
    is_setting = error.field.partition(".")[0] in MixedConfig.model_fields
    field = f"mixed.{error.field}" if is_setting else error.field
    return InputError(field, error.value, error.remedy)
