"""Upload of an exported folder to the Hugging Face Hub."""

from pathlib import Path
from typing import Literal

from semix.data.errors import InputError

OPTION = "--push-to-hub"


def check_repository(repository: str) -> None:
    """Raise InputError for what is no name of a repository of the Hugging Face Hub."""
    from huggingface_hub.errors import HFValidationError  # takes a second
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InputError(OPTION, repository, f"{error}; give OWNER/NAME") from None


def push_to_hub(
    folder: Path,
    repository: str,
    *,
    dry_run: bool,
    kind: Literal["model", "dataset"] = "model",
) -> list[str]:
    """Upload an exported folder to a repository of the Hugging Face Hub.

    Args:
        repository: OWNER/NAME; it is made if it does not exist.
        dry_run: only list what would be uploaded.
        kind: of the repository.
    Returns:
        The paths of the files in the folder.
    Raises:
        InputError: the Hub refuses it.
    """
    from huggingface_hub import HfApi  # takes a second
    from huggingface_hub.errors import HfHubHTTPError

    files = (path for path in folder.rglob("*") if path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    if dry_run:
        return names
    api = HfApi()
    try:
        api.create_repo(repository, repo_type=kind, exist_ok=True)
        api.upload_folder(repo_id=repository, repo_type=kind, folder_path=folder)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(OPTION, repository, reason) from None
    return names
