"""C4: encoding and writing on threads against webdataset's ShardWriter in the loop."""

import io
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import webdataset as wds
from PIL import Image
from sklearn.datasets import load_sample_images

from benchmarks.measure import Result, interleaved, ratio
from semix.data.images import decode_image, encode_image
from semix.pipeline.shard import encode_series
from semix.pipeline.shard_writer import Stopwatch, write_series
from tests import handmade

SERIES, ALPHAS, SIZE = 50, 8, 512


def run() -> Result:
    result = Result("C4", f"{SERIES * ALPHAS} photographs of {SIZE} px, wall seconds on 2 threads")
    photographs = crops(SERIES * ALPHAS).reshape(SERIES, ALPHAS, SIZE, SIZE, 3)
    png = [png_default(image) for image in photographs[0]]
    webp = encode_series(photographs[0], "webp")
    same_pixels = all(
        np.array_equal(decode_image(a), decode_image(b)) for a, b in zip(png, webp, strict=True)
    )
    result.equal("WebP decodes to the same pixels as PNG", same_pixels, True)
    size_ratio = sum(map(len, webp)) / sum(map(len, png))
    result.at_most("bytes over PNG's", size_ratio, 1.15)
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "ours": lambda: ours(photographs, folder),
            "PNG in the loop": lambda: peer(photographs, folder, png_default, "png"),
            "WebP in the loop": lambda: peer(photographs, folder, webp_fast, "webp"),
        }
        seconds = interleaved(sides, repeats=3, clock=time.perf_counter)
    against_png = ratio(seconds["PNG in the loop"], seconds["ours"])
    against_webp = ratio(seconds["WebP in the loop"], seconds["ours"])
    result.at_least("ratio to PNG in the loop", against_png["ratio"], 8.0)
    result.at_least("ratio to WebP in the loop", against_webp["ratio"], 1.6)
    kilobytes = sum(map(len, webp)) / len(webp) / 1000
    result.figures |= {
        "png": against_png,
        "webp": against_webp,
        "wall_seconds": seconds,
        "webp_kB": kilobytes,
    }
    return result


def crops(count: int) -> np.ndarray:
    """Squares at random positions and scales of scikit-learn's photographs, [N, SIZE, SIZE, 3]."""
    rng = np.random.default_rng(0)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    squares = []
    for index in range(count):
        photograph = photographs[index % 2]
        side = int(rng.integers(300, min(photograph.size)))
        left = int(rng.integers(0, photograph.width - side))
        top = int(rng.integers(0, photograph.height - side))
        square = photograph.crop((left, top, left + side, top + side))
        pixels = np.asarray(square.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.int16)
        # Noise as from a camera: without it an enlarged image would compress too well.
        grain = rng.integers(-3, 4, pixels.shape, dtype=np.int16)
        squares.append(np.clip(pixels + grain, 0, 255).astype(np.uint8))
    return np.stack(squares)


def ours(photographs: np.ndarray, folder: str) -> None:
    series = (
        (handmade.series_of(handmade.record(group, ALPHAS)), partial(encode_series, images, "webp"))
        for group, images in enumerate(photographs)
    )
    with Path(folder, "ours.tar").open("wb") as file:
        write_series(file, series, extension="webp", clock=Stopwatch(), threads=2)


def peer(photographs: np.ndarray, folder: str, encode, extension: str) -> None:  # type: ignore[no-untyped-def]
    """As img2dataset does: encode in the loop, pass the bytes to ShardWriter."""
    pattern = str(Path(folder, "peer-%04d.tar"))
    with wds.ShardWriter(pattern, maxsize=1e12, verbose=0) as writer:
        for group, series in enumerate(photographs):
            sample = {f"{i:02d}.{extension}": encode(image) for i, image in enumerate(series)}
            record = json.dumps({"group": group}).encode()
            writer.write({"__key__": f"{group:08d}", **sample, "json": record})


def png_default(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def webp_fast(image: np.ndarray) -> bytes:
    return encode_image(image, "webp")
