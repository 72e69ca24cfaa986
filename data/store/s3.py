"""S3 through s3fs: connection and faults."""

import errno
import os
from email.utils import parsedate_to_datetime

import aiohttp
import botocore.exceptions as boto
from fsspec import AbstractFileSystem
from s3fs import S3FileSystem

from semix.data.errors import InputError
from semix.data.store.location import printable_url
from semix.data.store.services import Info, RetryPolicy

SHARED = True  # several machines can write to one store
PARALLEL = 32  # connections; additional threads would wait for one

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; and all 5xx but 501.
RETRY_CODES = {
    "BadDigest",  # the body was damaged on its way
    "ConditionalRequestConflict",  # two create-only writes at once: a retry shows which wrote
    "IncompleteBody",
    "NoSuchUpload",  # completed, but the answer was lost; or a sweep removed it
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",
}
RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504}
RETRY_FAULTS = (
    aiohttp.ClientError,  # a truncated body
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    TimeoutError,
    ConnectionError,
)
NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
)
REFUSED_CREDENTIALS = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}


def connect(policy: RetryPolicy) -> AbstractFileSystem:
    """A new file system; those that fsspec shares cache listings, which other writers change.

    botocore takes endpoint, region and credentials from the environment.
    """
    fs = S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        max_concurrency=1,  # with more, every read would ask for the size first
        config_kwargs={
            # botocore retries single requests (a page of a listing, a part of an upload) with
            # growing random pauses; `retrying` retries whole operations.
            "retries": {"mode": "standard", "total_max_attempts": policy.attempts},
            "connect_timeout": policy.connect_s,
            "read_timeout": policy.answer_s,
            "max_pool_connections": PARALLEL,
        },
    )
    fs.retries = 1  # more would repeat botocore's retries, without end if a server stalls
    return fs


def transient_reason(error: Exception) -> str | None:
    code, status = _answer(error)
    if code:
        return f"{code} ({status})" if status in RETRY_STATUS or code in RETRY_CODES else None
    if isinstance(error, boto.SSLError | boto.ProxyConnectionError):
        return None
    return type(error).__name__ if isinstance(error, RETRY_FAULTS) else None


def translate_error(error: Exception, url: str, where: str) -> Exception:
    # Messages of servers and libraries are left out: they may hold keys and signatures.
    code, status = _answer(error)
    if isinstance(error, NO_CREDENTIALS):
        remedy = "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return InputError("url", url, f"{remedy} in the environment ({type(error).__name__})")
    if code in REFUSED_CREDENTIALS:
        remedy = "the credentials of the environment were refused; renew or correct them"
        return InputError("url", url, f"{remedy} ({code})")
    if code == "RequestTimeTooSkewed":
        return InputError("url", url, f"refused: the clock of this machine is wrong ({code})")
    if code == "NoSuchBucket":
        return InputError("url", url, "there is no such bucket; create it, or correct its name")
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, "exists", where)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "not found", where)
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, f"refused: {code} ({status})", where)
    if code:
        return OSError(errno.EIO, f"{code} ({status})", where)
    if isinstance(error, (*RETRY_FAULTS, boto.BotoCoreError)):
        return ConnectionError(errno.EIO, f"transfer failed: {type(error).__name__}", where)
    return error


def modified_time(info: Info) -> float:
    return info["LastModified"].timestamp()


def writer_options(writer_id: str) -> dict[str, object]:
    return {"Metadata": {"writer": writer_id}}


def writer_id_of(fs: AbstractFileSystem, path: str) -> str | None:
    return fs.metadata(path).get("writer")


def now(fs: AbstractFileSystem, bucket_path: str) -> float:
    bucket, _, prefix = bucket_path.partition("/")
    answer = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
    date = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
    return parsedate_to_datetime(date).timestamp()


def address() -> str:
    return printable_url(
        os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
    )


def _answer(error: Exception) -> tuple[str | None, int | None]:
    """Code and status of a server's answer, which s3fs keeps as the cause of its own errors."""
    for candidate in (error, error.__cause__):
        if isinstance(candidate, boto.ClientError):
            answer = candidate.response
            code = str(answer.get("Error", {}).get("Code", "error"))
            return code[:64], answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return None, None
