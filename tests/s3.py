"""A real S3 server on the loopback, and a proxy before it that misbehaves when told to."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_proxy import FaultyS3

KEY_ID, SECRET = "semix-test-key", "semix-test-secret"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a moto server process that ends with this one."""
    command = [sys.executable, "-m", "tests.s3_server"]
    # The server ends when its standard input is closed, which happens even if we are killed.
    environment = {**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "100"}  # pages of listings are short
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    ) as process:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.terminate()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a new, empty bucket; the environment of this test leads to its server."""
    for name in list(os.environ):
        if name.startswith("AWS_") and name != "AWS_CA_BUNDLE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client, name = s3_client(s3_server), f"semix-{secrets.token_hex(4)}"
    client.create_bucket(Bucket=name)
    yield f"s3://{name}"
    empty(client, name)


@pytest.fixture
def faulty_s3(s3_server: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The proxy, healthy until told otherwise; the environment of this test leads to it."""
    with FaultyS3(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def s3_client(endpoint: str) -> Any:
    """A boto3 client, to look at a bucket without semix's own code."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


def empty(client: Any, bucket: str) -> None:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        keys = [{"Key": item["Key"]} for item in page.get("Contents", [])]
        if keys:
            client.delete_objects(Bucket=bucket, Delete={"Objects": keys})
    client.delete_bucket(Bucket=bucket)
