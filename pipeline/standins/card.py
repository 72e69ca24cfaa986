"""The model cards of the stand-ins: what they are, and what they are not."""

from collections.abc import Sequence

from pipeline.config import PLACEHOLDER
from pipeline.prompts import prompts
from pipeline.standins.recipe import Recipe

_DIFFUSION = """\
# A small stand-in for Stable Diffusion

A latent diffusion model in the format of a diffusers `StableDiffusionPipeline`: AutoencoderKL,
UNet2DConditionModel, CLIPTextModel with a tokenizer of its own, DDIMScheduler. It was trained from
scratch by semix. It holds **no weights of Stable Diffusion** or of any other model.

{facts}
- Training: autoencoder {recipe.autoencoder.steps} steps, then U-Net and text encoder together
  {recipe.denoiser.steps} steps, v-prediction, moving average of the weights
- Captions: {captions}; {recipe.dropped_captions:.0%} replaced by the empty one for guidance

It knows these classes at this size and nothing else. Its purpose is to run the whole of semix
without a download; for pictures worth looking at, name a real Stable Diffusion model instead.

```python
from diffusers import StableDiffusionPipeline

pipeline = StableDiffusionPipeline.from_pretrained("FOLDER", use_safetensors=True)
image = pipeline({example!r}, num_inference_steps=20, guidance_scale=2.0).images[0]
```
"""

_CLIP = """\
# A small stand-in for CLIP

A contrastive image and text model in the format of open_clip. It was trained from scratch by
semix. It holds **no weights of OpenAI's CLIP**, OpenCLIP or of any other model.

{facts}
- Training: {recipe.clip.steps} steps of {recipe.clip.batch_size} images, contrastive loss in which
  all pairs of one class match
- Captions: {captions}

It knows these classes at this size and nothing else. Its purpose is to run the whole of semix
without a download; for other pictures, name a real CLIP model instead.

```python
import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")
```
"""


def model_cards(
    class_names: Sequence[str], recipe: Recipe, *, digest: str, images: int, size: int
) -> tuple[str, str]:
    """README.md of the diffusion pipeline and of the CLIP model."""
    shown = [_one_line(name) for name in class_names[:10]]
    names = ", ".join(shown) + (", ..." if len(class_names) > len(shown) else "")
    facts = (
        f"- Data: {images} training images of {size} x {size} pixels in {len(class_names)} classes "
        f"({names})\n"
        f"- Digest of data, settings, code and library versions: `{digest}`"
    )
    words = {
        "facts": facts,
        "recipe": recipe,
        "captions": ", ".join(f'"{template}"' for template in (*recipe.templates, PLACEHOLDER)),
        "example": prompts(recipe.templates[0], class_names)[0],
    }
    return _DIFFUSION.format(**words), _CLIP.format(**words)


def _one_line(name: str) -> str:
    return " ".join(name.split())
