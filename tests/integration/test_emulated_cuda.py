"""The product on an emulated CUDA device: no device is mixed up, and results are the CPU's."""

import copy
import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from semix.calib.config import TrainConfig
from semix.calib.config.loss import LOSSES
from semix.calib.config.method import METHODS
from semix.calib.evaluate import evaluate_run
from semix.calib.judge import Judge
from semix.calib.run_folder import claim_run
from semix.calib.stopping import Interrupted, never
from semix.calib.train import train_run
from semix.data.formats import SeriesLabels
from semix.data.real import load_real
from semix.data.root import Root
from semix.data.settings import load_settings
from semix.data.tar import GroupSample, read_shard
from semix.flows.evaluate import measure_run, prepare_evaluation
from semix.pipeline.annotate import Encoders
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import BuildConfig, GeneratorConfig
from semix.pipeline.generators import load_generator
from semix.pipeline.generators.schedulers import ddim_pair
from semix.pipeline.noise import initial_noise, inversion_stability
from semix.pipeline.plan import MixGroup, build_of
from semix.pipeline.prototypes import ensure_prototypes
from semix.pipeline.relabel import ensure_set_prototypes, plan_set, relabelled_config
from semix.pipeline.shard import conditions
from semix.pipeline.shard_job import BuildJob
from semix.pipeline.worker import Worker
from semix.pipeline.worker import main as worker
from tests.calib.conftest import REAL, mixed_url, one_thread  # noqa: F401
from tests.calib.runs import assert_same_results, history, stop_after
from tests.emulated_cuda import emulated_cuda
from tests.pipeline.conftest import (  # noqa: F401
    tiny_dit,
    tiny_flux,
    tiny_flux2,
    tiny_sd,
    tiny_sd3,
    tiny_sdxl,
    tiny_z_image,
)
from tests.pipeline.roots import create_root
from tests.pipeline.test_memory import FAMILIES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


@pytest.fixture
def cuda() -> Iterator[None]:
    with emulated_cuda():
        yield


MIXED = "two devices"


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda own, cpu: own + cpu, MIXED),
        (lambda own, cpu: cpu.add_(own), MIXED),
        (lambda own, cpu: own @ cpu, MIXED),
        (lambda own, cpu: torch.cat([own, cpu]), MIXED),
        (lambda own, cpu: torch.stack([own.sum(), cpu.sum()]), MIXED),
        (lambda own, cpu: own.index_select(0, cpu[0].long()), MIXED),
        (lambda own, cpu: cpu[own[0].long()], MIXED),
        (lambda own, cpu: own.index_put_((own[0].long(),), cpu), MIXED),
        (lambda own, cpu: own.sum() + cpu, MIXED),
        (lambda own, cpu: functional.conv2d(own[None, None], cpu[None, None]), MIXED),
        (lambda own, cpu: functional.cross_entropy(own, cpu[0].long()), MIXED),
        (lambda own, cpu: functional.scaled_dot_product_attention(own, cpu, cpu), MIXED),
        (lambda own, cpu: nn.Linear(2, 2)(own), MIXED),
        (lambda own, cpu: nn.Linear(2, 2).cuda()(cpu), MIXED),
        (lambda own, cpu: own.numpy(), "can't convert cuda:0"),
        (lambda own, cpu: torch.randn(2, generator=torch.Generator(), device="cuda"), "generator"),
        (lambda own, cpu: own.normal_(generator=torch.Generator()), "generator"),
    ],
)
def test_wrong_devices_raise_as_on_cuda(cuda, operation, message):
    with pytest.raises((RuntimeError, TypeError), match=message):
        operation(torch.ones(2, 2, device="cuda"), torch.ones(2, 2))


def test_what_cuda_allows_is_allowed(cuda):
    on_gpu = torch.arange(6.0, device="cuda").view(2, 3)
    assert (on_gpu * torch.tensor(2.0)).device == torch.device("cuda:0")
    assert on_gpu[torch.tensor([1])].tolist() == [[3, 4, 5]]
    assert on_gpu[[1, 0], 1:].tolist() == [[4, 5], [1, 2]]
    on_gpu[torch.tensor([0])] = torch.tensor(7.0)
    on_gpu[[0], 0] = 8
    assert on_gpu.tolist() == [[8, 7, 7], [3, 4, 5]]
    assert on_gpu.copy_(torch.ones(2, 3)).tolist() == torch.ones(2, 3).copy_(on_gpu).tolist()
    assert on_gpu.to("cuda") is on_gpu
    assert on_gpu.cuda() is on_gpu
    alias, moved = on_gpu.view(-1), on_gpu.cpu()
    alias += 1
    assert (on_gpu.sum().item(), float(moved.sum())) == (12, 6)
    assert torch.ones(2).to(on_gpu).is_cuda
    for created in (
        torch.zeros(2, device="cuda"),
        torch.zeros_like(on_gpu),
        torch.tensor(1).cuda(),
    ):
        assert created.device == on_gpu.device
    assert torch.zeros_like(on_gpu, device="cpu").device.type == "cpu"
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda
    assert functional.one_hot(torch.tensor([0, 1], device="cuda")).is_cuda


def test_a_module_trains_on_the_device_as_on_the_cpu():
    def trained(device: str, kind: type[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        )
        weight = network[0].weight
        network.to(device)
        assert network[0].weight is weight
        assert {value.device.type for value in network.state_dict().values()} == {device}
        optimiser = kind(network.parameters(), lr=0.1, foreach=True)
        images = torch.randn(5, 3, 4, 4).to(device)
        for _ in range(3):
            optimiser.zero_grad()
            functional.cross_entropy(network(images), torch.ones(5).long().to(device)).backward()
            optimiser.step()
        assert all(parameter.grad.device.type == device for parameter in network.parameters())
        state = copy.deepcopy(network).state_dict()
        return {name: value.cpu() for name, value in state.items()}

    for kind in (torch.optim.SGD, torch.optim.AdamW):
        expected = trained("cpu", kind)
        with emulated_cuda():
            torch.testing.assert_close(trained("cuda", kind), expected, rtol=0, atol=0)


def test_the_device_draws_from_a_generator_of_its_own(cuda):
    torch.manual_seed(3)
    first_draw, state = torch.randn(4, device="cuda"), torch.cuda.get_rng_state()
    second_draw = torch.randn(4, device="cuda")
    assert torch.equal(
        torch.randn(4), first_draw.cpu()
    )  # seeded alike, and not moved by the device
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn_like(first_draw), second_draw)


def test_everything_is_as_before_afterwards():
    with emulated_cuda():
        assert torch.cuda.is_available()
        assert torch.accelerator.is_available()
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()
    weight = nn.Linear(2, 2).to("cpu").weight
    weight.sum().backward()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(2, device="cuda")


SMALL = (
    "mixing.pairs={kind: sampled, count: 3}",
    "mixing.alphas=3",
    "generator.steps=2",
    "shards.groups_per_shard=2",
    "shards.groups_per_batch=2",
)
SELECT = ("noise.strategy=select", "noise.candidates=4", "noise.halving=true", "noise.steps=2")
STRATEGIES = {
    "random": (),
    "select": (*SELECT, "noise.max_cost=1000"),
    "optimise": (
        "noise.strategy=optimise",
        "noise.candidates=1",
        "noise.iterations=1",
        "noise.steps=1",
        "noise.max_cost=1000",
        "mixing.pairs.count=1",
    ),
}
VARIANTS = {
    "bfloat16": ("generator.dtype=bfloat16",),
    "three classes": (
        "mixing.classes=3",
        "mixing.grid=random",
        "mixing.alphas=5",
        "annotation.rule=simplex",
        *STRATEGIES["select"],
    ),
    "spherical": ("mixing.interpolation=spherical", "shards.store_size=16"),
    "similar": ("mixing.pairs={kind: similar, count: 3}", "shards.image_format=jpg"),
    "guided in an interval": ("mixing.alphas=4", "generator.guidance_interval=[0, 0.6]"),
}


@pytest.fixture
def build(hasty_config: BuildConfig, tmp_path: Path) -> Callable[..., Root]:
    """build(device, *overrides): a finished root."""

    def run(device: str, *overrides: str) -> Root:
        config = load_settings(BuildConfig, hasty_config.model_dump(), (*SMALL, *overrides))
        root = create_root(config, str(tmp_path / device))
        ensure_prototypes(build_of(root), device=device)
        assert worker([root.url, "--device", device]) == 0
        return root

    return run


def samples(root: Root) -> list[GroupSample]:
    return [sample for entry in root.records() for sample in read_shard(root.store, entry)]


# Scores of optimised noise, which may differ in their last bits: under a dispatch mode of torch
# the gradients of a CPU do as well.
SCORES = ("scores", "per_alpha", "stability", "start_stability")


def assert_same_shards(root: Root, other: Root) -> None:
    assert root.done() == other.done() != []
    for sample, twin in zip(samples(root), samples(other), strict=True):
        assert sample.images == twin.images
        notes = sample.record.noise, twin.record.noise
        if notes[0]["strategy"] == "optimise":
            for scores in ([note.pop(name) for note in notes] for name in SCORES):
                torch.testing.assert_close(*map(torch.tensor, scores), rtol=1e-5, atol=0)
        assert sample.record == twin.record
    for record, other_record in zip(root.records(), other.records(), strict=True):
        assert record.features.sha256 == other_record.features.sha256


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["stable_diffusion", "sdxl", "dit"])
def test_shards_are_those_of_the_cpu(family, strategy, build, request):
    overrides = STRATEGIES[strategy]
    if family != "stable_diffusion":
        model = request.getfixturevalue(f"tiny_{family}")
        overrides += (f"generator.family={family}", f"generator.model={model}")
    expected = build("cpu", *overrides)
    with emulated_cuda():
        root = build("cuda", *overrides)
    assert_same_shards(root, expected)


OPTIMISE = (*STRATEGIES["optimise"], "noise.candidates=2", "noise.halving=false")


@pytest.mark.parametrize("model", FAMILIES)
def test_offloaded_weights_take_part_in_the_choice_of_noise(model, build, request):
    generator = FAMILIES[model] | {"model": str(request.getfixturevalue(model))}
    if model == "tiny_z_image":
        generator["pad_names"] = True
    settings = [f"generator.{name}={value}" for name, value in generator.items()]
    with emulated_cuda():
        expected = build("cuda:0", *settings, *OPTIMISE)
        offloaded = build("cuda", *settings, *OPTIMISE, "generator.offload=model")
    assert_same_shards(offloaded, expected)


@pytest.mark.parametrize("model", ["tiny_sd3", "tiny_flux", "tiny_flux2", "tiny_z_image"])
def test_offloaded_text_encoders_work_on_the_device_and_leave_it(
    model, request, tmp_path, monkeypatch
):
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path))  # no prompt was encoded before
    settings = FAMILIES[model] | {"model": str(request.getfixturevalue(model)), "steps": 2}
    encoders: list[tuple[weakref.ref[nn.Module], str]] = []

    def note(layer: nn.Module, *_: object) -> None:
        if isinstance(layer, PreTrainedModel):
            encoders.append((weakref.ref(layer), layer.device.type))

    def images(device: str, **more: str) -> torch.Tensor:
        config = load_settings(GeneratorConfig, settings | more)
        generator = load_generator(config, device=device)
        condition = generator.encode(["dog"])
        assert [encoder() for encoder, _ in encoders] == [None] * len(encoders)
        noise = initial_noise([0], generator.latent_shape)
        return generator.decode(generator.sample(noise, condition)).cpu()

    hook = register_module_forward_hook(note)
    gc.disable()  # nothing but the product's own collection
    try:
        with emulated_cuda():
            offloaded = images("cuda", offload="model")
    finally:
        gc.enable()
        hook.remove()
    assert {device for _, device in encoders} == {"cuda"}
    assert torch.equal(offloaded, images("cpu"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_of_other_settings_are_those_of_the_cpu(variant, build):
    expected = build("cpu", *VARIANTS[variant])
    with emulated_cuda():
        root = build("cuda", *VARIANTS[variant])
    assert_same_shards(root, expected)


def test_all_models_are_on_the_device_and_prototypes_are_measured_there(
    build, other_clip, tmp_path, monkeypatch
):
    second = f"annotation.second={{model: 'local-dir:{other_clip}'}}"
    expected, devices = build("cpu", second), set()
    monkeypatch.setenv("SEMIX_CACHE", str(tmp_path / "fresh"))  # nothing was measured before
    encode = Encoders.encode

    def watched(encoders: Encoders, images: torch.Tensor) -> dict[str, torch.Tensor]:
        result = encode(encoders, images)
        models = [encoder.model for encoder in encoders._loaded.values()]
        assert len(models) == 2
        devices.update(weight.device.type for model in models for weight in model.parameters())
        return result

    monkeypatch.setattr(Encoders, "encode", watched)
    with emulated_cuda():
        root = build("cuda", second)
        assert devices == {"cuda"}
        root.discard(1)
        job = BuildJob(build_of(root))
        assert Worker(job, 0, 1, device="auto").run() == 0
        networks = list(vars(job.models.generator.denoiser.pipeline).values())
        weights = [
            w
            for network in networks
            if isinstance(network, nn.Module)
            for w in network.parameters()
        ]
        assert weights
        assert {weight.device.type for weight in weights} == {"cuda"}
    assert_same_shards(root, expected)
    name = "prototypes.safetensors"
    assert root.store.get(name) == expected.store.get(name)


def test_labels_of_another_clip_are_those_of_the_cpu(build, other_clip, tmp_path):
    root = build("cpu")
    shutil.copytree(root.url, tmp_path / "copy")

    def relabelled(root: Root, device: str) -> dict[int, Mapping[int, SeriesLabels]]:
        config = relabelled_config(root, [f"annotation.model=local-dir:{other_clip}"])
        labels = plan_set(root, config)
        ensure_set_prototypes(labels, device=device)
        assert worker([root.url, "--labels", labels.digest, "--device", device]) == 0
        assert labels.missing() == []
        return {shard: labels.labels(shard) for shard in labels.done()}

    expected = relabelled(root, "cpu")
    with emulated_cuda():
        assert relabelled(Root(str(tmp_path / "copy")), "cuda") == expected


TRAINING = {
    "name": "small",
    "real": REAL | {"test_per_class": 5},
    "loss": {"name": "fedlas_ls"},
    "model": {"name": "resnet8", "width": 2},
    "epochs": 2,
    "batch_size": 20,
    "augment": {"shift": 1},
    "optimiser": {"name": "adamw", "learning_rate": 0.01},
    "head": {"epochs": 2, "batch_size": 20},
    "trackers": (),
    "evaluation": {"bootstrap": 10},
}
RUNS = {
    "fedlas, masks, parts": ("accumulate=2",),
    "averaged, chosen": ("ema=0.8", "select=nll", "head.select=ece", "head.mask_mode=preserve"),
    "expected": (
        "loss.name=ce",
        "optimiser.name=sgd",
        "head.inference=expected",
        "head.mask_mode=preserve",
        "head.augment=true",
        "head.views=1",
    ),
    "separate norms, tst": ("mixed.batch_norm=separate", "head.method=tst", "augment.shift=0"),
    "vtst": ("mixed=null", "head.method=vtst", "head.optimiser.learning_rate=0.01"),
    "shifted": (
        "mixed.scale=4.0",
        "head=null",
        "evaluation.shift={corruptions: [contrast], severities: [3], images: 30}",
    ),
}


@pytest.fixture
def train_on(mixed_url: str, tmp_path: Path) -> Iterator[Callable[..., Path]]:  # noqa: F811
    """train_on(device, *overrides, stop=never): a run folder, trained and measured."""

    def run(device: str, *overrides: str, stop: Callable[[], bool] = never) -> Path:
        values = TRAINING | {"mixed": {"url": mixed_url}}
        config = load_settings(TrainConfig, values, overrides)
        folder = claim_run(config, tmp_path / device).parent
        AcceleratorState._reset_state(reset_partial_state=True)
        train_run(folder, device=device, stop=stop)
        return folder

    yield run
    AcceleratorState._reset_state(reset_partial_state=True)


def assert_same_run(run: Path, other: Path) -> None:
    names = {path.name for path in (other / "seed-0").glob("*.safetensors")}
    assert {"model.safetensors", "logits-base.safetensors"} <= names
    assert_same_results(other, run, weights=sorted(names))
    rows = [json.loads((folder / "evaluation.json").read_text())["rows"] for folder in (run, other)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("settings", RUNS)
def test_trainings_and_their_figures_are_those_of_the_cpu(settings, train_on):
    expected = train_on("cpu", *RUNS[settings])
    with emulated_cuda():
        run = train_on("cuda", *RUNS[settings])
        assert_same_run(run, expected)
        settings = prepare_evaluation(run, ["evaluation.bins=10"], device="cuda")
        evaluation = measure_run(settings, run, device="cuda", fresh=True)
    evaluate_run(expected, device="cpu", fresh=True)
    assert [row["kinds"]["plain"]["nll"] for row in evaluation["rows"]] == [
        row["kinds"]["plain"]["nll"]
        for row in json.loads((expected / "evaluation.json").read_text())["rows"]
    ]


SHORT = ("epochs=1", "head.epochs=1", "evaluation.bootstrap=0")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_on_the_device(loss, train_on):
    overrides = (f"loss.name={loss}", "mixed.loss=soft_ce", "epochs=1", "head=null")
    expected = train_on("cpu", *overrides)
    with emulated_cuda():
        assert_same_run(train_on("cuda", *overrides), expected)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_the_device(method, train_on):
    overrides = (f"method.name={method}", "loss.name=ce", "model.width=4", "epochs=1", "head=null")
    expected = train_on("cpu", *overrides)
    with emulated_cuda():
        assert_same_run(train_on("cuda", *overrides), expected)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_the_network_and_keeps_the_rest_in_float32(
    precision, train_on, monkeypatch
):
    conv2d, outputs = functional.conv2d, set()

    def watched(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        result = conv2d(*args, **kwargs)
        outputs.add((torch.is_grad_enabled(), result.dtype, result.device.type))
        return result

    monkeypatch.setattr(functional, "conv2d", watched)
    with emulated_cuda():
        run = train_on("cuda", f"mixed_precision={precision}", *SHORT)
    half_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert (True, half_dtype, "cuda") in outputs
    assert (False, torch.float32, "cuda") in outputs  # measured without
    weights = load_file(run / "seed-0" / "model.safetensors").values()
    assert {w.dtype for w in weights if w.is_floating_point()} == {torch.float32}
    assert all(0 < line["loss"] < 10 for line in history(run) if line["stage"] == "head")


def test_a_training_that_was_stopped_in_an_epoch_goes_on_bit_for_bit(train_on, tmp_path):
    """The head's latents are drawn on the device, whose generator's state is saved."""
    overrides = ("mixed=null", "head.method=vtst")
    with emulated_cuda():
        unbroken = train_on("cuda", *overrides).rename(tmp_path / "whole")
        with pytest.raises(Interrupted, match="head: stopped in epoch 1 after step 2"):
            train_on("cuda", *overrides, stop=stop_after(2, steps=2))
        torch.randn(3, device="cuda")
        assert_same_run(train_on("cuda", *overrides), unbroken)


def test_an_audits_judge_works_on_the_device(train_on):
    run = train_on("cpu", "mixed=null", "head=null", *SHORT[:1])
    images = torch.from_numpy(load_real(Judge(run).config.real).test.images())
    expected = Judge(run, device="cpu").classes(images)
    with emulated_cuda():
        judge = Judge(run)
        assert torch.equal(judge.classes(images), expected)
        weights = [weight for network in judge.classifiers for weight in network.parameters()]
    assert {weight.device.type for weight in weights} == {"cuda"}


class Copies(TorchDispatchMode):
    """Counts copies from the CPU to the device; each makes the CPU wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_to_copy", "to"):  # the latter in inference mode
            result = func(*args, **(kwargs or {}))
            self.count += (args[0].device.type, result.device.type) == ("cpu", "cuda")
            return result
        return func(*args, **(kwargs or {}))


SAMPLED = {
    "tiny_sdxl": {"family": "sdxl", "guidance_scale": 2.0},
    "tiny_dit": {"family": "dit", "guidance_scale": 2.0},
    "tiny_sd3": {"family": "sd3", "prompt_length": 12, "guidance_scale": 2.0},
    "tiny_flux": {"family": "flux", "prompt_length": 12, "image_size": 16},
}


@pytest.mark.parametrize("model", SAMPLED)
def test_steps_copy_nothing_to_the_device(model, request):
    """The schedule comes there at once, however many steps it has."""
    folder = str(request.getfixturevalue(model))

    def copies(steps: int) -> int:
        config = GeneratorConfig(model=folder, steps=steps, **SAMPLED[model])
        generator = load_generator(config, device="cuda", names=["dog", "crane"])
        condition = generator.encode(["dog", "crane"])
        noise = initial_noise([0, 1], generator.latent_shape)
        with Copies() as copied:
            generator.sample(noise, condition)
        return copied.count

    with emulated_cuda():
        assert copies(2) == copies(5) == 2  # noise and schedule


@pytest.mark.parametrize("model", ["tiny_sdxl", "tiny_dit"])
def test_inversion_copies_nothing_to_the_device(model, request):
    """Both schedules come there at once, for sampling and for its inverse."""
    config = GeneratorConfig(model=str(request.getfixturevalue(model)), steps=2, **SAMPLED[model])

    def copies(steps: int) -> int:
        generator = load_generator(config, device="cuda", names=["dog", "crane"])
        condition = generator.encode(["dog", "crane"])
        noise = initial_noise([0, 1], generator.latent_shape).to("cuda")
        pair = ddim_pair(generator.scheduler)
        with torch.no_grad(), Copies() as copied:
            inversion_stability(
                noise, condition, predict=generator.predict, schedulers=pair, steps=steps
            )
        return copied.count

    with emulated_cuda():
        assert copies(2) == copies(5) == 2  # of the two schedules


@pytest.mark.parametrize("classes", [2, 3])
def test_mixtures_of_a_batch_are_copied_to_the_device_at_once(classes):
    weights = ((0.5, 0.5, 0.0)[:classes],) * 4
    groups = [MixGroup(index, tuple(range(classes)), 0, weights) for index in range(6)]
    with emulated_cuda():
        embeddings = Conditioning(torch.randn(3, 2, 4).to("cuda"), torch.randn(3, 4).to("cuda"))
        with Copies() as copied:
            conditions(groups, embeddings, "linear")
    assert copied.count == 1
