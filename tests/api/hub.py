"""A hub that serves the files of a folder as the Hugging Face hub does, as far as a download asks for."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A hub, and its faults."""

    address: str = ""
    taken: list[str] = field(default_factory=list)
    """The names of the files whose download began."""
    ranges: list[str] = field(default_factory=list)
    """The ranges that were asked for."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """Until it is set, tensors are sent up to their half."""
    cuts: int = 0
    """Times that the connection breaks in the middle of tensors."""
    damaged: bool = False
    """The last byte of tensors comes changed."""
    claimed: int = 0
    """Bytes that tensors have by the hub's list, if not their own."""
    broken: bool = False
    """Every download answers 500."""
    hidden: int = 0
    """Bytes of each file that the list leaves out; its hashes are those of the whole file."""
    stray: str | None = None
    """The name of a file that is listed besides."""
    sent: int = 0
    """Bytes of tensors that were sent."""


def _listed(repository: Path, hub: Hub) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for file in sorted(each for each in repository.rglob("*") if each.is_file()):
        body = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
        entry: dict[str, object] = {"rfilename": str(file.relative_to(repository)), "size": len(body), "blobId": git}
        if file.suffix in {".safetensors", ".bin"}:
            size = hub.claimed or len(body)
            lfs = {"sha256": hashlib.sha256(body).hexdigest(), "size": size, "pointerSize": 134}
            entry |= {"size": size, "blobId": COMMIT, "lfs": lfs}
        entries.append(entry | {"size": int(str(entry["size"])) - hub.hidden})
    return entries + ([{"rfilename": hub.stray, "size": 1, "blobId": COMMIT}] if hub.stray else [])


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """Serve each ``org/name`` below the folder. Nothing waits until ``go_on`` is cleared."""
    state = Hub()
    state.go_on.set()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            parts = path.removeprefix("api/models/").split("/")
            repository = folder / parts[0] / parts[1]
            if not repository.is_dir():
                self._answer(404, b"{}", X_Error_Code="RepoNotFound")
            elif "/resolve/" in path:
                self._send(repository.joinpath(*parts[4:]))
            elif "/revision/" in path and re.fullmatch("main|[0-9a-f]{40}", parts[-1]) is None:
                self._answer(404, b"{}", X_Error_Code="RevisionNotFound")
            else:
                assert "blobs=true" in self.path.lower()
                listed = {
                    "id": "/".join(parts[:2]), "sha": COMMIT, "private": False, "downloads": 0, "likes": 0, "tags": [],
                    "siblings": _listed(repository, state),
                }  # fmt: skip
                self._answer(200, json.dumps(listed).encode(), Content_Type="application/json")

        def _send(self, file: Path) -> None:
            body = file.read_bytes()
            named = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
            if self.command == "HEAD":
                self._answer(200, body, **named)
                return
            if state.broken:
                self._answer(500, b"")
                return
            state.taken.append(file.name)
            start = 0
            if (begin := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) is not None:
                state.ranges.append(begin[0])
                start = int(begin[1])
                named["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            if file.suffix != ".safetensors":
                self._answer(206 if start else 200, body[start:], **named)
                return
            if state.damaged:
                body = body[:-1] + bytes([body[-1] ^ 1])
            self.send_response(206 if start else 200)
            for name, value in named.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            half = max(start, len(body) // 2)
            self.wfile.write(body[start:half])
            self.wfile.flush()
            state.sent += half - start
            if state.cuts:
                state.cuts -= 1
                self.close_connection = True
                return
            if state.go_on.wait(8):
                for at in range(half, len(body), 2**16):
                    self.wfile.write(body[at : at + 2**16])
                    state.sent += len(body[at : at + 2**16])

        do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A download that was cancelled closes its connection."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        state.go_on.set()
        server.shutdown()
        server.server_close()


@contextmanager
def hub_of_this_process(address: str) -> Iterator[None]:
    """Within the block the hub's client in this process asks the hub at an address. A process gets HF_ENDPOINT."""
    import pytest
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", constants.DOWNLOAD_CHUNK_SIZE)  # both are set by the server
        patch.setattr(constants, "HF_HUB_DISABLE_XET", constants.HF_HUB_DISABLE_XET)
        yield
