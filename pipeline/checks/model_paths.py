"""Where models are: a local path or a hub id."""

from pathlib import Path

from data.errors import InputError
from pipeline.config import LoraConfig


def local_path(model: str) -> Path | None:
    """The path, `~` expanded; None for a hub id.

    What looks like a path is one, whether or not something is there; a name like `owner/model`
    is one where something is there.
    """
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~"))
    return path if looks_local or path.exists() else None


def lora_file(lora: LoraConfig) -> tuple[str, str]:
    """Folder or hub id, and the file in it; diffusers takes them apart.

    Raises:
        InputError: another format than safetensors; nothing there; several files to choose from.
    """
    path, field = local_path(lora.path), "generator.lora"
    folder, name = str(path or lora.path), lora.weight_name
    if path is not None and not path.exists():
        raise InputError(field, path, "there is no such file or directory")
    if path is not None and path.is_file():
        folder, name = str(path.parent), path.name
    elif name is None:
        files = sorted(file.name for file in path.glob("*.safetensors")) if path else []
        if path is not None and not files:
            raise InputError(field, path, "has no safetensors; convert it")
        if len(files) != 1:
            found = f"holds {', '.join(files)}" if files else "may hold several files"
            raise InputError(field, lora.path, f"{found}; choose one as weight_name")
        name = files[0]
    if not name.endswith(".safetensors"):
        raise InputError(field, lora.path, f"{name} is no safetensors file; convert it")
    return folder, name
