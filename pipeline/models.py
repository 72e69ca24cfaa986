"""What a worker keeps loaded: generator, annotator, embeddings of all classes, noise source."""

from collections.abc import Callable
from dataclasses import dataclass

from data.device import resolve_device
from data.errors import InputError
from data.root import PROTOTYPES, Root
from pipeline.annotate import Annotator, build_annotator
from pipeline.conditioning import Conditioning
from pipeline.costs.work import Work, work_or_reason
from pipeline.generators import Generator, load_generator
from pipeline.noise.source import NoiseSource, noise_source
from pipeline.plan import BuildPlan
from pipeline.prompts import spoken_names


@dataclass(frozen=True)
class Models:
    """What stays loaded in a worker.

    Attributes:
        embeddings: what the generator is told for each class, one row each.
        noise: gives each group its initial noise.
        work: what a series costs, for commit records; None where that cannot be counted.
    """

    generator: Generator
    annotator: Annotator
    embeddings: Conditioning
    noise: NoiseSource
    work: Work | None = None


def load_models(
    root: Root, plan: BuildPlan, *, device: str, beat: Callable[[], None] = lambda: None
) -> Models:
    """Load generator, CLIP and prototypes; encode every class name once.

    Args:
        beat: called while noises are chosen, for whoever watches that work goes on.
    Raises:
        InputError: a model cannot be loaded or does not suit; two prompts encode alike.
        ValueError: the prototypes are damaged.
    """
    device = resolve_device(device)
    config = plan.config
    annotator = build_annotator(config.annotation, root.store.get(PROTOTYPES), device=device)
    annotator.encoders.load()
    generator = load_generator(config.generator, device=device)
    embeddings = class_embeddings(generator, plan)
    noise = noise_source(plan, generator=generator, embeddings=embeddings, beat=beat)
    work, _ = work_or_reason(config)
    return Models(generator, annotator, embeddings, noise, work)


def class_embeddings(generator: Generator, plan: BuildPlan) -> Conditioning:
    """One row a class.

    Raises:
        InputError: a name that the model cannot take; two that it cannot tell apart.
    """
    names = spoken_names(plan.config.generator, plan.class_names)
    embeddings = generator.encode(names)
    flat = embeddings.tokens.flatten(1)
    for index in range(1, len(flat)):
        same = (flat[:index] == flat[index]).all(dim=1).nonzero()
        if len(same):
            pair = f"{names[int(same[0])]!r} and {names[index]!r}"
            remedy = "encode identically; give one another name under generator.names"
            raise InputError("generator.prompt", pair, remedy)
    return embeddings
