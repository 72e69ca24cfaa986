"""A small server with the calls of Google's storage API that a store makes, as documented."""

import json
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "semix-test"
PAGE = 100  # names per page of a listing


@pytest.fixture
def gs_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket; the environment of this test leads to its server."""
    handler = type("Handler", (_Handler,), {"objects": {}, "uploads": {}, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    yield f"gs://{BUCKET}"
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """https://cloud.google.com/storage/docs/json_api/v1: objects insert, get, list, delete."""

    objects: dict[str, dict[str, Any]]  # by name: the resource, and its bytes as "content"
    uploads: dict[str, dict[str, Any]]  # resumable ones that are not complete
    lock: threading.Lock
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match = re.fullmatch(
            r"/(?:upload/)?(?:download/)?storage/v1/b/([^/]+)/o(?:/(.+))?", url.path
        )
        if not match or match[1] != BUCKET:
            return self._answer(404, {"error": {"code": 404, "message": "no such bucket"}})
        name = unquote(match[2] or query.get("name", ""))
        with self.lock:
            if self.command == "POST":
                return self._insert(name, query, body)
            if not match[2]:
                return self._list(query)
            if name not in self.objects:
                return self._answer(404, {"error": {"code": 404, "message": "no such object"}})
            if self.command == "DELETE":
                del self.objects[name]
                return self._answer(204, b"")
            return self._get(name, query)

    do_GET = do_POST = do_DELETE = _serve

    def _insert(self, name: str, query: dict[str, str], body: bytes) -> None:
        if "upload_id" in query:
            return self._continue(query, body)
        if query["uploadType"] == "resumable":
            upload = f"{len(self.uploads)}-{time.time_ns()}"
            self.uploads[upload] = {**json.loads(body), "name": name, "content": b""}
            host, generation_match = self.headers["Host"], query.get("ifGenerationMatch")
            location = f"http://{host}/upload/storage/v1/b/{BUCKET}/o?upload_id={upload}"
            location += f"&ifGenerationMatch={generation_match}" if generation_match else ""
            return self._answer(200, {}, Location=location)
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()  # type: ignore[index]
        metadata_part, content_part = body.split(b"--" + boundary)[1:3]
        resource = json.loads(metadata_part.split(b"\n\n", 1)[1])
        return self._keep({**resource, "content": content_part.split(b"\n\n", 1)[1][:-1]}, query)

    def _continue(self, query: dict[str, str], body: bytes) -> None:
        upload = self.uploads[query["upload_id"]]
        upload["content"] += body
        total = int(self.headers["Content-Range"].rpartition("/")[2])
        if len(upload["content"]) < total:
            return self._answer(308, b"", Range=f"bytes=0-{len(upload['content']) - 1}")
        return self._keep(self.uploads.pop(query["upload_id"]), query)

    def _keep(self, resource: dict[str, Any], query: dict[str, str]) -> None:
        if query.get("ifGenerationMatch") == "0" and resource["name"] in self.objects:
            return self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        resource["size"] = str(len(resource["content"]))
        resource["updated"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        resource["generation"] = str(time.time_ns())
        self.objects[resource["name"]] = resource
        return self._answer(200, _without_content(resource))

    def _get(self, name: str, query: dict[str, str]) -> None:
        resource = self.objects[name]
        if query.get("alt") != "media":
            return self._answer(200, _without_content(resource))
        requested_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not requested_range:
            return self._answer(200, resource["content"])
        end = int(requested_range[2]) + 1 if requested_range[2] else None
        return self._answer(206, resource["content"][int(requested_range[1]) : end])

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items: dict[str, dict[str, Any] | None] = {}  # None: a folder
        for name in sorted(self.objects):
            remainder = name.removeprefix(prefix)
            if name.startswith(prefix) and delimiter and delimiter in remainder:
                items[prefix + remainder.split(delimiter)[0] + delimiter] = None
            elif name.startswith(prefix):
                items[name] = _without_content(self.objects[name])
        start = int(query.get("pageToken", 0))
        page_size = min(PAGE, int(query.get("maxResults", PAGE)))
        page = list(items.items())[start : start + page_size]
        answer: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [item for _, item in page if item],
            "prefixes": [name for name, item in page if item is None],
        }
        if start + page_size < len(items):
            answer["nextPageToken"] = str(start + page_size)
        return self._answer(200, answer)

    def _answer(self, status: int, content: bytes | dict[str, Any], **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _without_content(resource: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in resource.items() if key != "content"}
