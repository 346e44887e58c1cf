"""A hub that serves the files of a folder as the Hugging Face hub does, as far as a download asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve each ``org/name`` below the folder. Yields the address and the paths of the files that were downloaded."""
    taken: list[str] = []

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
                file = repository.joinpath(*parts[4:])
                body = file.read_bytes()
                if self.command == "GET":
                    taken.append(file.name)
                etag = hashlib.sha256(body).hexdigest()
                self._answer(200, body, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
            else:
                files = [file for file in sorted(repository.rglob("*")) if file.is_file()]
                if "/tree/" in path:
                    tree = [
                        {"type": "file", "oid": COMMIT, "size": file.stat().st_size, "path": file.name}
                        for file in files
                    ]
                    self._answer(200, json.dumps(tree).encode(), Content_Type="application/json")
                    return
                listed = {
                    "id": "/".join(parts[:2]), "sha": COMMIT, "private": False, "downloads": 0, "likes": 0, "tags": [],
                    "siblings": [{"rfilename": file.name} for file in files],
                }  # fmt: skip
                self._answer(200, json.dumps(listed).encode(), Content_Type="application/json")

        do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        server.server_close()
