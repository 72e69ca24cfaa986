"""G4, G5, G7: decoding in slices, CLIP in place, noise scored in batches."""

import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from benchmarks.gpu.bench import Bench
from benchmarks.measure import Result
from benchmarks.random_models import save_clip
from semix.data.device import float32_precision
from semix.pipeline.clip import ClipEncoder
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import EncoderConfig
from semix.pipeline.generators.schedulers import inversion_pair
from semix.pipeline.noise import initial_noise, inversion_stability


def g4_decode(bench: Bench) -> Result:
    result = Result("G4", f"{bench.size}: decoding 64 latents in slices")
    rates, memory = {}, {}
    for size in (1, 2, 4, 8, 16, 32):
        generator = bench.generator(decode_batch=size)
        latents = torch.randn(64, *generator.latent_shape, device=bench.device)
        if bench.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        rates[size] = 64 / bench.seconds(lambda: generator.decode(latents))  # noqa: B023
        if bench.device != "cpu":
            memory[size] = torch.cuda.max_memory_allocated() / 2**30
    result.at_least("best slice over one a call", max(rates.values()) / rates[1], 1.15)
    result.figures |= {"images_per_second": rates, "peak_GiB": memory}
    return result


def g5_clip(bench: Bench) -> Result:
    result = Result("G5", "ClipEncoder in batches on the device, against PIL and one image a call")
    bars = {"ViT-B-32-quickgelu": 15_000, "ViT-L-14-quickgelu": 1_200}
    for name in list(bars)[: 1 if bench.device == "cpu" else 2]:
        for dtype in ("float32", "bfloat16"):
            rate, single = _clip_rates(bench, name, dtype)
            result.figures[f"{name}, {dtype}"] = {"batched": rate, "one_by_one": single}
            if dtype == "bfloat16":
                result.at_least(f"{name}, images a second", rate, bars[name])
            if "B-32" in name:
                result.at_least(f"{name}, {dtype}, ratio", rate / single, 50)
    return result


def _clip_rates(bench: Bench, name: str, dtype: str) -> tuple[float, float]:
    """Images per second in batches, as semix encodes, and one at a time through PIL."""
    folder = bench.folder / name
    if not folder.is_dir():
        save_clip(folder, name)
    config = EncoderConfig(model=f"local-dir:{folder}")
    encoder = ClipEncoder(config, device=bench.device, dtype=dtype)
    transform = image_transform_v2(PreprocessCfg(**encoder.settings), is_train=False)
    calls, size = (8, 512) if bench.device != "cpu" else (1, 16)
    shape = (size, 512, 512, 3)
    pixels = torch.randint(256, shape, dtype=torch.uint8, device=bench.device)
    pictures = [Image.fromarray(p.cpu().numpy()) for p in pixels[:16]]

    def ours() -> None:
        for _ in range(calls):
            encoder.encode(pixels)

    @torch.inference_mode()
    @float32_precision("ieee")  # as ours
    def peer() -> None:
        for picture in pictures:
            inputs = transform(picture)[None].to(bench.device, encoder.dtype)
            encoder.model.encode_image(inputs).cpu()

    return calls * size / bench.seconds(ours), len(pictures) / bench.seconds(peer)


def g7_noise(bench: Bench) -> Result:
    result = Result("G7", f"{bench.size}: 16 noises at 3 alphas, T = 10, against one at a time")
    generator = bench.generator()
    pair = inversion_pair(generator.denoiser.scheduler)
    noise = initial_noise(range(16), generator.latent_shape).to(bench.device)
    classes = generator.encode(["cat", "dog"])
    half = Conditioning(torch.lerp(classes.tokens[:1], classes.tokens[1:], 0.5))
    tokens = torch.cat([classes.tokens, half.tokens])

    @torch.inference_mode()
    def batched() -> torch.Tensor:
        return inversion_stability(
            noise.repeat(3, 1, 1, 1),
            Conditioning(tokens.repeat_interleave(16, 0)),
            predict=generator.predict,
            schedulers=pair,
            steps=10,
        )

    @torch.inference_mode()
    def one_by_one() -> torch.Tensor:
        return torch.cat(
            [
                inversion_stability(
                    noise[index : index + 1],
                    Conditioning(tokens[row : row + 1]),
                    predict=generator.predict,
                    schedulers=pair,
                    steps=10,
                )
                for row in range(3)
                for index in range(16)
            ]
        )

    difference = float((batched() - one_by_one()).abs().max())
    ratio = bench.seconds(one_by_one, repeats=1) / bench.seconds(batched)
    result.at_least("batched over one at a time", ratio, 4.0)
    images, condition = bench.inputs(generator, 48)
    series_s = bench.seconds(lambda: generator.sample(images, condition)) / 48 * 8
    overhead = bench.seconds(batched) / series_s
    result.at_most("overhead over 0.1875 K", overhead / (0.1875 * 16), 1.1)
    result.figures |= {"score_difference": difference, "overhead_of_16": overhead}
    return result
