"""Google Cloud Storage through gcsfs: connection and faults."""

import errno
import os
from email.utils import parsedate_to_datetime

import aiohttp
import google.auth.exceptions as google_auth
import requests
from fsspec import AbstractFileSystem
from gcsfs.core import GCSFileSystem
from gcsfs.retry import ChecksumError, HttpError, is_retriable

from semix.data.errors import InputError
from semix.data.store.location import printable_url
from semix.data.store.services import Info, RetryPolicy

SHARED = True  # several machines can write to one store
EMULATOR = "STORAGE_EMULATOR_HOST"
FAULTS = (aiohttp.ClientError, requests.RequestException, ChecksumError)


def connect(policy: RetryPolicy) -> AbstractFileSystem:
    """A file system with the application default credentials of the environment.

    gcsfs retries single requests itself, six times, with growing random pauses.
    """
    return GCSFileSystem(
        # Never gcsfs's "cache" of tokens, which is a pickle in the home folder.
        token="anon" if os.environ.get(EMULATOR) else "google_default",
        skip_instance_cache=True,
        use_listings_cache=False,
        requests_timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=policy.connect_s, sock_read=policy.answer_s
        ),
    )


def transient_reason(error: Exception) -> str | None:
    if isinstance(error, HttpError):
        return f"HTTP {error.code}" if error.code != 401 and is_retriable(error) else None
    if isinstance(error, google_auth.GoogleAuthError):
        return type(error).__name__ if isinstance(error, google_auth.TransportError) else None
    transient = is_retriable(error) or isinstance(error, TimeoutError | ConnectionError)
    return type(error).__name__ if transient else None


def translate_error(error: Exception, url: str, where: str) -> Exception:
    # Messages of servers and libraries are left out: they may hold tokens.
    if isinstance(error, google_auth.GoogleAuthError) or _status(error) == 401:
        remedy = "no valid credentials; set GOOGLE_APPLICATION_CREDENTIALS in the environment"
        return InputError("url", url, f"{remedy} ({type(error).__name__})")
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, "exists", where)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "not found", where)
    if isinstance(error, OSError) and str(error).startswith("Forbidden"):
        return PermissionError(errno.EACCES, "refused (403)", where)
    if _status(error):
        return OSError(errno.EIO, f"HTTP {_status(error)}", where)
    if isinstance(error, (*FAULTS, TimeoutError, ConnectionError)):
        return ConnectionError(errno.EIO, f"transfer failed: {type(error).__name__}", where)
    return error


def modified_time(info: Info) -> float:
    return info["mtime"].timestamp()


def writer_options(writer_id: str) -> dict[str, object]:
    return {"metadata": {"writer": writer_id}}


def writer_id_of(fs: AbstractFileSystem, path: str) -> str | None:
    return fs.info(path).get("metadata", {}).get("writer")


def now(fs: AbstractFileSystem, bucket_path: str) -> float:
    headers, _ = fs.call("GET", "b/{}/o", bucket_path.partition("/")[0], maxResults=1)
    return parsedate_to_datetime(headers["Date"]).timestamp()


def address() -> str:
    return printable_url(os.environ.get(EMULATOR) or "storage.googleapis.com")


def _status(error: Exception) -> int | None:
    return int(error.code) if isinstance(error, HttpError) and error.code else None
