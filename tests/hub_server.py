"""Serves directories as model repositories, as the Hugging Face Hub does, only on this machine: for tests."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
from http import server
import json
import pathlib
import threading
from urllib import parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
TOKEN = "hf_of_the_tests"
REPOSITORY = "owner/model"
_LFS = (".safetensors", ".model")


@dataclasses.dataclass
class Hub:
    """One repository and how its server behaves; tests change the values while it runs.

    Attributes:
      directory: the files of every revision that has no directory of its own.
      endpoint: address of the server.
      storage: address of a second one, which holds the large files: downloads are redirected to it.
      revisions: commit by branch or tag.
      directories: of commits that have other files.
      is_gated: whether files are given only for `TOKEN`; the listing is public.
      is_private: whether nothing is given or known without `TOKEN`.
      refused: status with which everything is answered; 0 answers as usual.
      cut: bytes that are held back from answers with a large file.
      cuts: the number of such answers.
      declares_less: whether such an answer admits so in its length.
      flipped: whether the large files arrive with one wrong bit.
      sizes: what the listing says about the size of a file, where that is not the truth.
      requests: method and path of every request, in order.
      authorizations: of the storage: the tokens that it was sent.
    """

    directory: pathlib.Path
    endpoint: str = ""
    storage: str = ""
    revisions: dict[str, str] = dataclasses.field(default_factory=lambda: {"main": COMMIT})
    directories: dict[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False
    refused: int = 0
    cut: int = 0
    cuts: int = 1000
    declares_less: bool = False
    flipped: bool = False
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    requests: list[str] = dataclasses.field(default_factory=list)
    authorizations: list[str | None] = dataclasses.field(default_factory=list)

    def downloads(self) -> list[str]:
        """Returns the names of the files whose content was asked for, in order of names."""
        paths = [request.removeprefix("GET ") for request in self.requests if request.startswith("GET ")]
        found = {path.rpartition(f"/{commit}/")[2] for path in paths for commit in self.revisions.values()}
        return sorted(name for name in found if not name.startswith("/"))


@contextlib.contextmanager
def serve(directory: pathlib.Path) -> Iterator[Hub]:
    """Serves `directory` as `REPOSITORY` at 127.0.0.1 until the block ends."""
    hub = Hub(directory)
    servers = []
    for handler in (_Hub, _Storage):
        served = server.ThreadingHTTPServer(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": hub}))
        served.daemon_threads = True
        servers.append(served)
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{served.server_port}" for served in servers)
    threads = [threading.Thread(target=served.serve_forever, args=(0.01,)) for served in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for served, thread in zip(servers, threads, strict=True):
            served.shutdown()
            thread.join()
            served.server_close()


class _Handler(server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {parse.unquote(self.path)}")
        self.answer(parse.unquote(parse.urlsplit(self.path).path))

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, path: str) -> None:
        """Answers a request; each of the two servers has its own way."""

    def send(self, status: int, body: bytes = b"", cut: int = 0, **headers: str) -> None:
        """Sends an answer; of its body `cut` bytes are held back."""
        declared = len(body) - cut * self.hub.declares_less
        self.send_response(status)
        for name, value in {"Content-Length": str(declared), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: max(len(body) - cut, 0)])
        if cut and not self.hub.declares_less:
            self.close_connection = True


class _Hub(_Handler):
    def answer(self, path: str) -> None:
        hub = self.hub
        if hub.refused:
            return self.send(hub.refused)
        is_listing = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").split("/")[1:]
        if len(parts) < 3:
            return self.send(404)
        repository, kind, revision = "/".join(parts[:2]), parts[2], "/".join(parts[3:])
        token = self.headers["Authorization"]
        is_stranger = token != f"Bearer {TOKEN}"
        if repository != REPOSITORY or hub.is_private and is_stranger:
            status = 401 if token is None else 404
            return self.send(status, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if hub.is_gated and is_stranger and not is_listing:
            return self.send(401 if token is None else 403, X_Error_Code="GatedRepo")
        name = ""
        if kind == "resolve":
            revision, name = parts[3], "/".join(parts[4:])
        if revision not in hub.revisions and revision not in hub.revisions.values():
            return self.send(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        commit = hub.revisions.get(revision, revision)
        directory = hub.directories.get(commit, hub.directory)
        if is_listing:
            document = {"id": REPOSITORY, "sha": commit} if kind == "revision" else list(_tree(directory, hub.sizes))
            return self.send(200, json.dumps(document).encode(), Content_Type="application/json")
        file = directory / name
        if not file.is_file():
            return self.send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = file.read_bytes()
        headers = {"X_Repo_Commit": commit, "ETag": f'"{_blob_id(content)}"'}
        if name.endswith(_LFS):
            sha256 = hashlib.sha256(content).hexdigest()
            headers |= {"X_Linked_Etag": f'"{sha256}"', "X_Linked_Size": str(hub.sizes.get(name, len(content)))}
            return self.send(302, Location=f"{hub.storage}/{commit}/{name}", **headers)
        return self.send(200, content, **headers)


class _Storage(_Handler):
    def answer(self, path: str) -> None:
        hub = self.hub
        hub.authorizations.append(self.headers["Authorization"])
        _, commit, name = path.split("/", 2)
        content = bytearray((hub.directories.get(commit, hub.directory) / name).read_bytes())
        if hub.flipped:
            content[-1] ^= 1
        hub.cuts -= bool(hub.cut)
        cut = hub.cut * (hub.cuts >= 0)
        asked = self.headers["Range"]
        if asked is None:
            return self.send(200, bytes(content), cut)
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        whole = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        return self.send(206, bytes(content[start:]), cut, **whole)


def _tree(directory: pathlib.Path, sizes: dict[str, int]) -> Iterator[dict]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_dir():
            yield {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
            continue
        content = path.read_bytes()
        size = sizes.get(name, len(content))
        entry = {"type": "file", "path": name, "size": size, "oid": _blob_id(content)}
        if name.endswith(_LFS):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 130}
        yield entry


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
