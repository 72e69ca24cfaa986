"""Locate models, by a local path or a hub id with its commit, and check their format."""

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from socket import gaierror

from semix.data.errors import InputError
from semix.data.files import read_json
from semix.data.licences import CARD, read_card
from semix.data.model_identity import ModelCardFacts
from semix.pipeline.config import LoraConfig

COMMIT = re.compile("[0-9a-f]{40}")
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
SAFE = ".safetensors"
SHARD = re.compile(r"[\w.-]+\.safetensors")
QUANTISED = ("bitsandbytes", "torchao")  # supported methods, each a package of that name
INDEX = "model_index.json"  # lists the components of a pipeline
CLIP_SETTINGS = "open_clip_config.json"
# Weights that open_clip looks for in a folder, in this order.
CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")
NOT_LOADED = ("safety_checker", "feature_extractor", "image_encoder")  # components
# Suffixes of settings, vocabularies, sentencepiece models and chat templates.
SETTINGS = {".json", ".txt", ".model", ".jinja"}
# Names that diffusers and transformers give to the weights of a network: `model.safetensors`,
# `model-00001-of-00002.safetensors`, `model.safetensors.index.json`; with a variant before or
# behind the number.
WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:\.(\w+))?(?:-\d{5}-of-\d{5})?(?:\.(\w+))?\.safetensors"
    r"(?:\.index(?:\.(\w+))?\.json)?"
)


class NotLocal(InputError):
    """A hub model that was not downloaded, so that its files cannot be read yet."""


def local_path(model: str) -> Path | None:
    """The path of a local model, `~` expanded; None for a hub id.

    Text that looks like a path always is one; a name like `owner/model` is one if it exists.
    """
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~"))
    return path if looks_local or path.exists() else None


def local_copy(model: str, revision: str | None = None) -> Path | None:
    """The path of a local model, or of the downloaded copy of a hub id; None if there is none."""
    path = local_path(model)
    if path is not None:
        return path
    from huggingface_hub import snapshot_download  # not needed for a path
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def card_of(model: str, revision: str | None = None) -> ModelCardFacts:
    """What the model card in a model's folder, beside its file or in the hub's cache states.

    Nothing is downloaded; {} without a card.
    """
    path = local_path(model)
    if path is not None:
        return read_card((path.parent if path.is_file() else path) / CARD)
    from huggingface_hub import try_to_load_from_cache  # not needed for a path
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, CARD, revision=revision)
    except HFValidationError:
        return {}
    return read_card(Path(cached)) if isinstance(cached, str) else {}


def require_local_copy(model: str, revision: str | None, field: str) -> Path:
    """`local_copy`, but raises NotLocal for `field` instead of returning None."""
    path = local_copy(model, revision)
    if path is None:
        raise NotLocal(field, model, "is not on this machine; its cost is known once it is")
    return path


def reason_in_words(error: BaseException, model: str) -> str:
    """One line on why a library could not load a model; without the hub, with a remedy."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    offline_errors = (LocalEntryNotFoundError, ConnectionError, TimeoutError, gaierror)
    if any(isinstance(cause, offline_errors) for cause in _causes(error)):
        name = model.removeprefix("hf-hub:")
        return (
            "is not on this machine, and the hub cannot be reached from it; fetch it before with "
            f"`hf download {name} --revision COMMIT`, or give the path of a copy"
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"cannot be loaded: {lines[0]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def path_or_pinned_id(model: str, revision: str | None, field: str) -> Path | str:
    """The path of a local model, or else the hub id, which may then be downloaded.

    A branch or a tag may change; and a request to the hub also sends the user's token, so that an
    unpinned id is refused before the hub is contacted.

    Raises:
        InputError: for `field`, a hub id without a commit.
    """
    path = local_path(model)
    if path is None:
        check_commit(model, revision, field)
    return path or model


def require_folder(folder: Path, field: str) -> None:
    """Raises InputError with the absolute path if the folder does not exist."""
    if not folder.is_dir():
        raise InputError(field, folder.absolute(), "there is no such folder")


def check_commit(model: str, revision: str | None, field: str) -> None:
    """Raises InputError unless the revision is a commit."""
    if revision is None or not COMMIT.fullmatch(revision):
        remedy = f"pin the commit of {model} that you reviewed, 40 hexadecimal digits"
        if revision is None and ":" not in model:  # perhaps a mistyped path, without a dot first
            remedy += f"; there is no folder {Path(model).absolute()}"
        raise InputError(field, revision or "nothing", remedy)


def check_weights(folder: Path, field: str) -> None:
    """Refuse weights of other formats than safetensors, which can contain code.

    Raises:
        InputError: the folder of a network has no safetensors, or names weights of another format
            or in another folder.
    """
    suffixes = {path.suffix for path in folder.iterdir()}
    if suffixes & {*PICKLES, ".gguf"} and SAFE not in suffixes:
        raise InputError(field, folder, "has no safetensors; convert it")
    if (folder / "adapter_config.json").exists():
        remedy = "names a model to be fetched; merge the adapter into the weights and remove it"
        raise InputError(field, folder / "adapter_config.json", remedy)
    weight_lists = [(folder / "config.json", "transformers_weights")]
    weight_lists += [(index, "weight_map") for index in sorted(folder.glob(f"*{SAFE}.index*.json"))]
    for path, key in weight_lists:
        for name in _names(read_json(path).get(key)) if path.is_file() else []:
            if not SHARD.fullmatch(name):
                remedy = f"{key} names {name!r}, which is no safetensors file beside it; convert it"
                raise InputError(field, path, remedy)


def weight_files(folder: Path) -> dict[str | None, list[Path]]:
    """Weights of a network, and their indices, by variant; the key is None without one."""
    files = defaultdict(list)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := WEIGHTS.fullmatch(path.name):
            files[next(filter(None, match.groups()), None)].append(path)
    return dict(files)


def check_variant(folder: Path, variant: str | None) -> None:
    """Raises InputError for a network whose weights are all of other variants."""
    variants = weight_files(folder)
    if variants and not {variant, None} & set(variants):
        names = sorted(filter(None, variants))
        remedy = f"{folder} has weights of the variant {' or '.join(names)} alone; set it to "
        raise InputError("generator.variant", variant or "nothing", remedy + names[0])


def quantisation(folder: Path) -> str | None:
    """The quantisation method in a network's config; None if it is not quantised."""
    config = folder / "config.json"
    settings = read_json(config).get("quantization_config") if config.is_file() else None
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"  # the format of early releases
    return str(method)


def check_quantisation(folder: Path, field: str) -> None:
    """Raises InputError for an unsupported quantisation method, or one without its package."""
    method = quantisation(folder)
    if method is None:
        return
    if method not in QUANTISED:
        remedy = f"its weights were quantised by {method}; semix takes those of "
        remedy += f"{' and '.join(QUANTISED)}, or weights that were not quantised"
        raise InputError(field, folder, remedy)
    if find_spec(method) is None:
        remedy = f"its weights were quantised by {method}: pip install {method}"
        raise InputError(field, folder, remedy)


def lora_file(lora: LoraConfig) -> tuple[str, str]:
    """Folder or hub id, and the file in it, which diffusers takes separately.

    Raises:
        InputError: another format than safetensors; a missing file; several files to choose from;
            a hub id without a commit.
    """
    path, field = local_path(lora.path), "generator.lora"
    path_or_pinned_id(lora.path, lora.revision, f"{field} revision")
    folder, name = str(path or lora.path), lora.weight_name
    if path is not None and not path.exists():
        raise InputError(field, path.absolute(), "there is no such file or directory")
    if path is not None and path.is_file():
        folder, name = str(path.parent), path.name
    elif name is None:
        files = sorted(file.name for file in path.glob(f"*{SAFE}")) if path else []
        if path is not None and not files:
            raise InputError(field, path, "has no safetensors; convert it")
        if len(files) != 1:
            content = f"holds {', '.join(files)}" if files else "may hold several files"
            raise InputError(field, lora.path, f"{content}; choose one as weight_name")
        name = files[0]
    if not name.endswith(SAFE):
        raise InputError(field, lora.path, f"{name} is no safetensors file; convert it")
    return folder, name


def _names(value: object) -> list[str]:
    """The file names in an index, or the single one in a config."""
    names = value.values() if isinstance(value, dict) else [value]
    return sorted({str(name) for name in names if name is not None})


def loaded_file_names(
    folder: Path, *, variant: str | None = None, left_out: Container[str] = NOT_LOADED
) -> list[str]:
    """Names of the files that libraries read from a model's folder: that of a pipeline, an
    open_clip model, or one network or tokenizer.

    Args:
        variant: of the weights, where a component has weights of it.
        left_out: components of a pipeline that are not loaded.
    """
    if (folder / INDEX).is_file():
        components = [
            component
            for component, kind in sorted(read_json(folder / INDEX).items())
            if component not in left_out and isinstance(kind, list) and kind[0] is not None
        ]
        paths = ((name, _component_files(folder / name, variant)) for name in components)
        return [INDEX, *(f"{name}/{file}" for name, files in paths for file in files)]
    if (folder / CLIP_SETTINGS).is_file():
        weights = sorted(path.name for path in folder.glob(f"*{SAFE}"))
        preferred = [name for name in (*CLIP_WEIGHTS, f"model{SAFE}") if name in weights]
        return [CLIP_SETTINGS, *(preferred or weights)[:1]]
    return _component_files(folder, variant)


def loaded_file_hashes(recorded: Mapping[str, str], current: Mapping[str, str]) -> dict[str, str]:
    """The recorded hashes of files that are loaded; an older root hashed all files of a folder.

    Weights that were read but are missing now raise an error when they are loaded.
    """
    folders = {name.rpartition("/")[0] for name in current} - {""}

    def is_loaded(name: str) -> bool:
        suffix = Path(name).suffix
        settings = suffix in SETTINGS and ".index." not in name
        return name in current or (settings and name.rpartition("/")[0] in folders)

    return {name: digest for name, digest in recorded.items() if is_loaded(name)}


def _component_files(folder: Path, variant: str | None) -> list[str]:
    """Names of a component's settings files and weights, of the variant if there are any of it."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    settings = [n for n in names if Path(n).suffix in SETTINGS and ".index." not in n]
    files = weight_files(folder)
    return settings + [path.name for path in files.get(variant) or files.get(None) or ()]
