"""Stands in for the hub on this machine: the part of its interface that huggingface_hub and datasets use.

It serves folders as repositories at one commit. Some repositories are gated, and some files break off after a few bytes
the first time. It keeps every request, for tests to look at.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 1 << 16
"""Larger files are stored as git-lfs files, which have a sha256."""
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Repository:
    """A repository: its files, and its commit with the branches that name it."""

    folder: Path
    commit: str
    branches: tuple[str, ...] = ("main",)
    is_gated: bool = False
    breaks: dict[str, int] = field(default_factory=dict)
    """File -> bytes after which its download breaks off, once."""

    def entries(self) -> list[dict[str, Any]]:
        """Returns the files as the hub lists them."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                entry = {"type": "file", "oid": oid, "size": len(data), "path": str(path.relative_to(self.folder))}
                if len(data) > LARGE_BYTES:
                    entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                found.append(entry)
        return found


class Hub:
    """The server; `url` is for HF_ENDPOINT."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        """Begins to serve.

        Args:
            repositories: By kind and id, such as `models/owner/name`.
        """
        self.repositories = repositories
        self.is_closed = False
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path, asked range) of each request."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops serving: afterwards the hub cannot be reached."""
        self.is_closed = True  # for connections that are kept alive
        self._server.shutdown()
        self._server.server_close()

    def asked_for(self, text: str) -> list[tuple[str, str, str | None]]:
        """Returns the requests whose path has `text`."""
        return [request for request in self.requests if text in request[1]]


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serves repositories, named as `models/owner/name`, within the block."""
    hub = Hub(repositories)
    try:
        yield hub
    finally:
        hub.close()


def _directory(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.hub.is_closed:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if found := API.fullmatch(path):
            kind, name, what, revision, place = found.groups()
            self._describe(self.hub.repositories.get(f"{kind}/{name}"), what, revision or "main", place or "", body)
        elif found := FILE.fullmatch(path):
            dataset, name, revision, file = found.groups()
            self._file(self.hub.repositories.get(f"{'datasets' if dataset else 'models'}/{name}"), revision, file)
        else:
            self._fail(404, "EntryNotFound")

    def _refused(self, repository: Repository | None, revision: str) -> bool:
        """Answers for a repository or revision that is not there."""
        if repository is None:
            self._fail(401, "RepoNotFound")  # as the hub answers who is not logged in
        elif revision not in (repository.commit, *repository.branches):
            self._fail(404, "RevisionNotFound")
        else:
            return False
        return True

    def _describe(
        self, repository: Repository | None, what: str | None, revision: str, place: str, body: bytes
    ) -> None:
        if self._refused(repository, revision):
            return
        assert repository is not None
        entries = repository.entries()
        if what in (None, "revision"):
            siblings = [{"rfilename": entry["path"], "size": entry["size"]} for entry in entries]
            gated = "manual" if repository.is_gated else False
            self._json({"id": "stand-in", "sha": repository.commit, "siblings": siblings, "gated": gated})
        elif what == "paths-info":
            wanted = json.loads(body)["paths"]
            folders = [_directory(path) for path in wanted if (repository.folder / path).is_dir()]
            self._json([*folders, *(entry for entry in entries if entry["path"] in wanted)])
        else:
            below = [entry for entry in entries if entry["path"].startswith(f"{place}/" if place else "")]
            if "recursive=false" in self.path:
                below = [entry for entry in below if Path(entry["path"]).parent == Path(place)]
                inside = sorted(path for path in (repository.folder / place).iterdir() if path.is_dir())
                below += [_directory(str(path.relative_to(repository.folder))) for path in inside]
            self._json(below) if below else self._fail(404, "EntryNotFound")

    def _file(self, repository: Repository | None, revision: str, file: str) -> None:
        if self._refused(repository, revision):
            return
        assert repository is not None
        if repository.is_gated:
            self._fail(401, "GatedRepo")
            return
        entry = next((entry for entry in repository.entries() if entry["path"] == file), None)
        if entry is None:
            self._fail(404, "EntryNotFound", repository.commit)
            return
        data = (repository.folder / file).read_bytes()
        asked = RANGE.fullmatch(self.headers.get("Range") or "")
        start, stop = (int(asked[1]), int(asked[2] or len(data) - 1) + 1) if asked else (0, len(data))
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{entry.get("lfs", entry)["oid"]}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in repository.breaks:
            self.wfile.write(data[start : start + repository.breaks.pop(file)])
            self.close_connection = True
        else:
            self.wfile.write(data[start:stop])

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def write_wikitext(folder: Path, texts: dict[str, list[str]], subset: str = "wikitext-2-raw-v1") -> Path:
    """Writes a dataset of the layout of Salesforce/wikitext: one subset, a Parquet file for each split.

    Args:
        folder: Of the dataset.
        texts: Split -> its records.
        subset: Its name.
    """
    import pyarrow
    import pyarrow.parquet

    (folder / subset).mkdir(parents=True)
    for split, records in texts.items():
        file = folder / subset / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": records}), file)
    files = "".join(f"  - split: {split}\n    path: {subset}/{split}-*\n" for split in texts)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n{files}---\n")
    return folder
