"""Make one shard, from noise to commit record: models, batches, series and publishing."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from semix.data.device import device_name, resolve_device
from semix.data.errors import InputError
from semix.data.features import features_content
from semix.data.formats import (
    CommitRecord,
    Labels,
    LeftOut,
    SeriesRecord,
    shard_stem,
)
from semix.data.images import ENCODINGS, decode_image, encode_image
from semix.data.root import Root
from semix.data.threads import mapped
from semix.pipeline.annotate import Annotator, build_annotator, storage_faults
from semix.pipeline.conditioning import Conditioning, concatenate, mix
from semix.pipeline.config import ShardConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.latent_diffusion import LatentDiffusion
from semix.pipeline.noise.source import NoiseNote, NoiseSource, noise_source
from semix.pipeline.plan import BuildPlan, MixGroup, ShardSpec
from semix.pipeline.prompts import prompt_names
from semix.pipeline.provenance import library_versions
from semix.pipeline.shard_writer import Stopwatch, encoding_threads, publish_shard, write_series

MAX_LISTED = 5  # series left out that an error message lists


@dataclass(frozen=True)
class Models:
    """The models that stay loaded in a worker.

    Attributes:
        embeddings: conditioning of each class, one row per class.
        noise: gives each group its initial noise.
        prototypes: SHA-256 of their file, for commit records.
    """

    generator: LatentDiffusion
    annotator: Annotator
    embeddings: Conditioning
    noise: NoiseSource
    prototypes: str


def load_models(
    plan: BuildPlan,
    prototypes: bytes,
    *,
    device: str,
    heartbeat: Callable[[], None] = lambda: None,
) -> Models:
    """Load generator, CLIP and prototypes; encode every class name once.

    Args:
        prototypes: content of the prototypes file.
        heartbeat: called while noise is selected, to show that there is progress.
    Raises:
        InputError: a model cannot be loaded or does not suit; two prompts have equal encodings.
        ValueError: the prototypes are damaged.
    """
    device = resolve_device(device)
    config = plan.config
    annotator = build_annotator(config.annotation, prototypes, device=device)
    annotator.encoders.load()
    names = prompt_names(config.generator, plan.class_names)
    generator = load_generator(config.generator, device=device, names=names)
    embeddings = class_embeddings(generator, plan)
    noise = noise_source(plan, generator=generator, embeddings=embeddings, heartbeat=heartbeat)
    digest = hashlib.sha256(prototypes).hexdigest()
    return Models(generator, annotator, embeddings, noise, digest)


def class_embeddings(generator: LatentDiffusion, plan: BuildPlan) -> Conditioning:
    """Encode every class name, one row per class.

    Raises:
        InputError: a name that the model cannot take; two names with equal encodings.
    """
    names = prompt_names(plan.config.generator, plan.class_names)
    embeddings = generator.encode(names)
    flat = embeddings.tokens.flatten(1)
    for index in range(1, len(flat)):
        same = (flat[:index] == flat[index]).all(dim=1).nonzero()
        if len(same):
            pair = f"{names[int(same[0])]!r} and {names[index]!r}"
            remedy = "encode identically; give one another name under generator.names"
            raise InputError("generator.prompt", pair, remedy)
    return embeddings


def generate_shard(
    spec: ShardSpec,
    plan: BuildPlan,
    *,
    models: Models,
    root: Root,
    heartbeat: Callable[[], None] = lambda: None,
) -> "GeneratedShard":
    """Make one shard, whose tar is staged until it is published.

    Images are encoded on threads while the next ones are generated.

    Args:
        heartbeat: called after each batch, to show that there is progress.
    Raises:
        ValueError: more series are flat or not finite than `shards.max_left_out` allows.
    """
    clock = Stopwatch()
    with ExitStack() as stack:
        staged = stack.enter_context(root.store.staging(f"{shard_stem(spec.index)}.tar"))
        results = _write_tar(spec, plan, staged, models=models, clock=clock, heartbeat=heartbeat)
        return GeneratedShard(
            spec,
            root,
            staged,
            results,
            clock,
            device=models.generator.device,
            prototypes=models.prototypes,
            made_at=clock.wall,
            files=stack.pop_all(),
        )


@dataclass(frozen=True)
class GeneratedShard:
    """A shard that is made and not yet published.

    Attributes:
        staged: its whole tar, which is removed at the end of the block of `files`.
        made_at: by its clock.
    """

    spec: ShardSpec
    root: Root
    staged: Path
    results: "BatchResults"
    clock: Stopwatch
    device: torch.device
    prototypes: str
    made_at: float
    files: ExitStack

    def publish(self) -> CommitRecord:
        """Publish tar and features, then the commit record; needs no models, on any thread.

        Returns:
            The record. `wall_seconds` is the time until the worker may begin the next shard, the
            time for which this one waited for the one before it included; `seconds` of several
            stages overlap, those of "write" with the next shard's too.
        """
        spec, results, clock = self.spec, self.results, self.clock
        wall_seconds = clock.wall
        clock.add("stall", wall_seconds - self.made_at)
        with self.files:
            features = {name: torch.cat(rows) for name, rows in results.features.items()}
            return publish_shard(
                self.root,
                spec.index,
                self.staged,
                features_content(features),
                clock=clock,
                groups=spec.stop - spec.start - len(results.left_out),
                first=spec.start,
                wall_seconds=wall_seconds,
                versions=library_versions() | {"device": device_name(self.device)},
                prototypes=self.prototypes,
                left_out=results.left_out,
            )


@dataclass
class BatchResults:
    """The results of a shard's batches that are not in its tar.

    Attributes:
        features: [g, A, D] per batch, by encoder.
    """

    features: dict[str, list[Tensor]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def _write_tar(
    spec: ShardSpec,
    plan: BuildPlan,
    staged: Path,
    *,
    models: Models,
    clock: Stopwatch,
    heartbeat: Callable[[], None],
) -> BatchResults:
    """Generate all series and write those that can be stored into the staged tar."""
    extension, results = plan.config.shards.image_format, BatchResults()

    def series() -> Iterator[tuple[SeriesRecord, Callable[[], list[bytes]]]]:
        for groups in batches(spec, plan):
            batch = make_batch(groups, plan, models=models, clock=clock)
            results.left_out += batch.left_out
            _check_left_out(results.left_out, spec, plan)
            for row, labels in zip(batch.storable, batch.labels(models.annotator), strict=True):
                record = series_record(groups[row], plan, labels=labels, noise=batch.noise[row])
                with clock.stage("stall"):  # until an encoding thread is free
                    yield record, batch.encoding(row, plan.config.shards)
            for name, rows in batch.features.items():
                results.features.setdefault(name, []).append(rows[batch.storable])
            heartbeat()
        last_stage.enter_context(clock.stage("stall"))  # until the last series is written

    with staged.open("wb") as file, ExitStack() as last_stage:
        write_series(file, series(), extension=extension, clock=clock)
    return results


def _check_left_out(left_out: Sequence[LeftOut], spec: ShardSpec, plan: BuildPlan) -> None:
    """Raises ValueError for more than `shards.max_left_out` allows: at least one, but never all."""
    planned, fraction = spec.stop - spec.start, plan.config.shards.max_left_out
    limit = min(max(1, int(fraction * planned)), planned - 1) if fraction else 0
    if len(left_out) > limit:
        examples = "; ".join(f"group {s.group}: {s.reason}" for s in left_out[:MAX_LISTED])
        count = f"{len(left_out)} series or more of {planned} cannot be stored"
        raise ValueError(f"{count}, shards.max_left_out allows {limit}: {examples}")


def batches(spec: ShardSpec, plan: BuildPlan) -> Iterator[list[MixGroup]]:
    """Yield the groups of each batch; the batch layout changes the last bits of images."""
    size = plan.config.shards.groups_per_batch
    for start in range(spec.start, spec.stop, size):
        yield [plan.group(index) for index in range(start, min(start + size, spec.stop))]


@dataclass(frozen=True)
class GeneratedBatch:
    """Some groups, generated and encoded by CLIP.

    Attributes:
        images: as stored, uint8 [G, A, H, W, 3] on the CPU.
        image_files: where the format is lossy, since CLIP must see the stored pixels; else None.
        features: [G, A, D] on the CPU, by the name of their encoder.
        noise: the `noise` part of each record.
        faults: why a series cannot be stored, by its row.
    """

    groups: Sequence[MixGroup]
    images: np.ndarray
    image_files: list[list[bytes]] | None
    features: dict[str, Tensor]
    noise: list[NoiseNote]
    faults: dict[int, str]

    @property
    def storable(self) -> list[int]:
        """Rows of the series that can be stored."""
        return [row for row in range(len(self.groups)) if row not in self.faults]

    @property
    def left_out(self) -> list[LeftOut]:
        faults = sorted(self.faults.items())
        return [LeftOut(group=self.groups[row].index, reason=reason) for row, reason in faults]

    def labels(self, annotator: Annotator) -> list[Labels]:
        """Labels of the storable series, in their order."""
        rows = self.storable
        features = {name: values[rows] for name, values in self.features.items()}
        return annotator.annotate(features, [self.groups[row] for row in rows]) if rows else []

    def encoding(self, row: int, settings: ShardConfig) -> Callable[[], list[bytes]]:
        """A call that encodes one series to image files, for an encoding thread."""
        if self.image_files is not None:
            return partial(list, self.image_files[row])
        extension, mark = settings.image_format, settings.mark
        return partial(encode_series, self.images[row], extension, mark=mark)


@torch.no_grad()  # not inference mode: noise gradients pass conditions and offloaded weights
def make_batch(
    groups: Sequence[MixGroup], plan: BuildPlan, *, models: Models, clock: Stopwatch
) -> GeneratedBatch:
    """Generate some groups and encode them with CLIP, on the device."""
    settings = plan.config.shards
    with clock.stage("noise"):
        noise, notes, unusable = models.noise(groups)
    with clock.stage("generate"):
        images, faults = mix_groups(
            groups,
            noise,
            embeddings=models.embeddings,
            generator=models.generator,
            batch_groups=settings.groups_per_batch,
            interpolation=plan.config.mixing.interpolation,
        )
        images = resized(images, settings.store_size)
        stored = images.cpu().numpy()
    image_files = None
    if not ENCODINGS[settings.image_format].lossless:
        with clock.stage("encode"):
            image_files, images = encode_and_decode(
                stored, settings.image_format, mark=settings.mark
            )
    with clock.stage("annotate"):
        flat = models.annotator.encode(images.flatten(0, 1))
        features = {name: rows.unflatten(0, images.shape[:2]) for name, rows in flat.items()}
    # The reason of the earliest step wins.
    faults = storage_faults(features) | faults | unusable
    return GeneratedBatch(groups, stored, image_files, features, notes, faults)


def mix_groups(
    groups: Sequence[MixGroup],
    noise: Tensor,
    *,
    embeddings: Conditioning,
    generator: LatentDiffusion,
    batch_groups: int,
    interpolation: str = "linear",
) -> tuple[Tensor, dict[int, str]]:
    """Generate all series of some groups in one forward batch, one noise per group.

    Args:
        groups: at most `batch_groups`; fewer are padded with the last one, because the batch
            layout changes the last bits of an image.
        noise: float32 [G, C, h, w], one per group.
        embeddings: of all classes, one row per class.
    Returns:
        uint8 [G, A, H, W, 3] on the generator's device; and faults of degenerate series by row.
    """
    padding = batch_groups - len(groups)
    padded = [*groups, *[groups[-1]] * padding]
    noise = torch.cat([noise, noise[-1:].expand(padding, *noise.shape[1:])])
    count = len(padded[0].mixture)
    latents = generator.sample(
        noise.repeat_interleave(count, dim=0), conditions(padded, embeddings, interpolation)
    )
    images = generator.decode(latents)
    rows = len(groups) * count
    faults = degenerate(images[:rows], count, "image")
    faults |= degenerate(latents[:rows], count, "latents")
    return images.view(batch_groups, count, *images.shape[1:])[: len(groups)], faults


def conditions(
    groups: Sequence[MixGroup], embeddings: Conditioning, interpolation: str
) -> Conditioning:
    """Mixed conditionings, one row per image, group by group."""
    mixtures = torch.tensor([group.mixture for group in groups]).to(embeddings.tokens.device)
    return concatenate(
        mix(embeddings, group.classes, mixture, interpolation)
        for group, mixture in zip(groups, mixtures, strict=True)
    )


def degenerate(values: Tensor, count: int, kind: str) -> dict[int, str]:
    """Find constant or non-finite latents or images; return the first fault of each series, by row.

    Args:
        values: [G x count, ...], `count` rows per series.
    """
    flat = values.flatten(1)
    minimum, maximum = flat.amin(1), flat.amax(1)
    faults: dict[int, str] = {}
    for row in ((minimum == maximum) | ~torch.isfinite(minimum + maximum)).nonzero()[:, 0].tolist():
        value = float(maximum[row])
        reason = f"is one flat value ({value:g})"
        if not np.isfinite(value) or not torch.isfinite(minimum[row]):
            reason = "has NaN or infinite values; try another dtype"
        faults.setdefault(row // count, f"{kind} {row % count} {reason}")
    return faults


def resized(images: Tensor, size: int | None) -> Tensor:
    """Scale uint8 [G, A, H, W, 3] to [G, A, size, size, 3] by area; None leaves it as it is.

    A new pixel is the mean of the pixels it covers, rounded once; Pillow's BOX filter rounds twice.
    """
    if size is None or images.shape[2:4] == (size, size):
        return images
    flat = images.flatten(0, 1).permute(0, 3, 1, 2).float()
    small = F.interpolate(flat, (size, size), mode="area").round().to(torch.uint8)
    return small.permute(0, 2, 3, 1).unflatten(0, images.shape[:2])


def encode_series(series: np.ndarray, extension: str, *, mark: bool = False) -> list[bytes]:
    """Encode uint8 [A, H, W, 3] to the bytes of A files."""
    return [encode_image(image, extension, mark=mark) for image in series]


def encode_and_decode(
    series: np.ndarray, extension: str, *, mark: bool
) -> tuple[list[list[bytes]], Tensor]:
    """Encode uint8 [G, A, H, W, 3] on threads; return the files and, for CLIP, their pixels."""

    def stored(images: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        files = encode_series(images, extension, mark=mark)
        return files, np.stack([decode_image(file) for file in files])

    pairs = [*mapped(stored, series, threads=encoding_threads())]
    return [files for files, _ in pairs], torch.from_numpy(np.stack([img for _, img in pairs]))


def series_record(
    group: MixGroup, plan: BuildPlan, *, labels: Labels, noise: NoiseNote
) -> SeriesRecord:
    """The record of one series, its `KEY.json`."""
    return SeriesRecord.from_labels(
        labels,
        group=group.index,
        classes=list(group.classes),
        names=[plan.class_names[k] for k in group.classes],
        seed=group.seed,
        alphas=group.alphas,
        noise=dict(noise),
        mixture=[*map(list, group.mixture)] if len(group.classes) > 2 else None,
        synthetic=plan.config.shards.mark,
    )
