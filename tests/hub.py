"""A Hugging Face Hub on 127.0.0.1 for tests: what the real client sends to push, pull and open pull requests on models,
and to read data sets, which are repositories whose name begins with datasets/.

    with Hub.serve(folder, os.environ["HF_ENDPOINT"]) as hub:  # which the client reads when it is imported
        hub.fail_next("POST", "/commit/", 503)

Clients run with default settings: hf_xet writes the chunks of large files into `xet_folder` (its own test backend, casUrl
"local://...").
Nothing here is the real server: what it answers was recorded from what clients accept.
"""

import base64
import hashlib
import json
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pt", ".gz", ".onnx", ".parquet")


@dataclass(frozen=True)
class File:
    """Contents, or of a large file the hash that it is stored under, and its size."""

    data: bytes = b""
    sha256: str | None = None
    stored_size: int = 0

    @property
    def size(self) -> int:
        return self.stored_size if self.sha256 else len(self.data)

    @property
    def oid(self) -> str:
        """The hash that git would give it; of a large file, its pointer's."""
        blob = self.data
        if self.sha256:
            blob = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()


class Repo:
    """One model or data set: commits, each a tree of files by path, and the names that point at them."""

    def __init__(self, *, private: bool = False):
        self.private = private
        self.commits: dict[str, dict[str, File]] = {}
        self.refs: dict[str, str] = {}
        self.commit("main", {".gitattributes": File()})

    def commit(self, ref: str, tree: dict[str, File]) -> str:
        """Add a commit and point a name at it."""
        oid = self.refs[ref] = secrets.token_hex(20)
        self.commits[oid] = tree
        return oid

    def add(self, path: str, data: bytes) -> None:
        """Write a small file, as somebody else would."""
        self.commit("main", self.tree() | {path: File(data)})

    def resolve(self, revision: str) -> str | None:
        """Return the commit that a branch, a pull request or a hash stands for."""
        revision = unquote(revision).removeprefix("refs/heads/")
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    def tree(self, revision: str = "main") -> dict[str, File]:
        """Return all files, by path."""
        return self.commits[self.resolve(revision)]

    def pull_requests(self) -> list[str]:
        return [ref for ref in self.refs if ref.startswith("refs/pr/")]

    def read(self, path: str) -> bytes:
        """Return a small file, for assertions."""
        return self.tree()[path].data


class Refusal(Exception):
    """An error as the real Hub words it: status, message and the code that clients read from a header."""

    def __init__(self, status: int, message: str, code: str = ""):
        self.status, self.message, self.code = status, message, code


class Hub:
    """Repositories, users, stored files, and what tests have planned."""

    def __init__(self, xet_folder: Path, endpoint: str):
        self.users = {"hf_tester": "tester"}  # token -> name
        self.repos: dict[str, Repo] = {}
        self.xet_folder = xet_folder
        self.xet_files: dict[str, tuple[str, int]] = {}  # SHA-256 -> Xet's hash, size
        self.requests = 0
        self.planned: list[tuple[str, str, Callable[[Handler], bool | None]]] = []  # method, path; True: all was answered
        self.lock = threading.RLock()
        self.endpoint = endpoint

    @classmethod
    @contextmanager
    def serve(cls, xet_folder: Path, endpoint: str):
        """Run at an address of this machine."""
        hub = cls(xet_folder, endpoint)
        address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        server = ThreadingHTTPServer(address, type("BoundHandler", (Handler,), {"hub": hub}))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def fail_next(self, method: str, pattern: str, status: int, *, times: int = 1, **headers: str) -> None:
        """Answer the next requests of this method, whose path matches, with an error; 0 cuts the connection."""
        self.planned += [(method, pattern, partial(Handler.fail, status=status, headers=headers))] * times

    def before_next(self, method: str, pattern: str, action: Callable[["Handler"], None]) -> None:
        """Do something, as somebody else would, right before the next request of this method, whose path matches."""
        self.planned.append((method, pattern, action))

    def stored(self) -> set[str]:
        """Return the SHA-256 of all large files that have arrived."""
        return set(_scan_shards(self.xet_folder))

    def has(self, sha256: str) -> bool:
        if sha256 not in self.xet_files:
            self.xet_files |= _scan_shards(self.xet_folder)
        return sha256 in self.xet_files


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        """Keep the tests' output clean."""

    def answer(self, status: int, body=b"", headers: dict | None = None, kind: str = "application/json") -> None:
        """Send a body: bytes as they are, all else as JSON."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        fields = {"Content-Type": kind, "X-Request-Id": "Root=1-test", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, headers: dict) -> bool:
        """Answer as a test has planned."""
        if status:
            self.answer(status, {"error": "asked for by the test"}, headers)
        else:
            self.close_connection = True
            self.connection.close()
        return True

    def handle_any(self):
        """Read the request, look for what a test has planned, else route."""
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query, keep_blank_values=True)
        self.user = self.hub.users.get((self.headers.get("Authorization") or "").removeprefix("Bearer ").strip())
        with self.hub.lock:
            self.hub.requests += 1
            for plan in self.hub.planned:
                method, pattern, action = plan
                if method == self.command and re.search(pattern, url.path):
                    self.hub.planned.remove(plan)
                    if action(self):
                        return
                    break
            try:
                self.route(url.path)
            except Refusal as no:
                code = {"X-Error-Code": no.code} if no.code else {}
                self.answer(no.status, {"error": no.message}, {"X-Error-Message": no.message, **code})

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any

    def route(self, path: str) -> None:
        routes = (
            (r"/api/validate-yaml", lambda: self.answer(200, {"errors": [], "warnings": []})),
            (r"/api/repos/create", self.create),
            (r"/((?:datasets/)?[^/]+/[^/]+)/resolve/(refs(?:/|%2F)pr(?:/|%2F)\d+|[^/]+)/(.+)", self.resolve),
            (r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(?:/revision/(.+))?", self.info),
            (r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", self.tree),
            (r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self.preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/(.+)", self.commit),
            (r"/api/models/([^/]+/[^/]+)/xet-(?:read|write)-token/.+", self.xet_token),
        )
        for pattern, action in routes:
            if found := re.fullmatch(pattern, path):
                action(*found.groups())
                return
        raise Refusal(404, f"the test's Hub has no {self.command} {path}")

    def repo(self, name: str, *, write: bool = False) -> Repo:
        """Return a repository that this user may read, or write to."""
        found = self.hub.repos.get(name)
        owner = name.split("/")[-2]
        if found is None or (found.private and self.user != owner):
            raise Refusal(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and self.user != owner and "create_pr" not in self.query:
            raise Refusal(403, "You don't have the rights to create a commit. Pass `create_pr=1` to create a Pull Request.")
        return found

    def at(self, name: str, revision: str | None, *, write: bool = False) -> tuple[Repo, str, dict[str, File]]:
        """Return a repository, and the commit and the tree of a revision of it."""
        repo = self.repo(name, write=write)
        oid = repo.resolve(revision or "main")
        if oid is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, oid, repo.commits[oid]

    def create(self) -> None:
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        asked = json.loads(self.body)
        owner = asked.get("organization") or self.user
        name = f"{owner}/{asked['name']}"
        url = f"{self.hub.endpoint}/{name}"
        if owner != self.user:
            raise Refusal(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        if name in self.hub.repos:
            self.answer(409, {"error": "You already created this model repo", "url": url})
            return
        self.hub.repos[name] = Repo(private=bool(asked.get("private")) or asked.get("visibility") == "private")
        self.answer(200, {"url": url, "name": name, "id": name})

    def info(self, name: str, revision: str | None) -> None:
        repo, oid, tree = self.at(name, revision)
        facts = {"id": name.removeprefix("datasets/"), "modelId": name, "sha": oid, "private": repo.private, "tags": []}
        self.answer(200, facts | {"siblings": [{"rfilename": path} for path in sorted(tree)]})

    def tree(self, name: str, revision: str, folder: str | None) -> None:
        _, _, tree = self.at(name, revision)
        inside = f"{unquote(folder)}/" if folder else ""
        below = {path.removeprefix(inside): path for path in sorted(tree) if path.startswith(inside)}
        deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        found = [_entry(path, tree[path]) for short, path in below.items() if deep or "/" not in short]
        if not deep:
            folders = sorted({inside + short.split("/")[0] for short in below if "/" in short})
            found += [{"type": "directory", "path": one, "oid": "0" * 40, "size": 0} for one in folders]
        self.answer(200, found)

    def resolve(self, name: str, revision: str, path: str) -> None:
        _, oid, tree = self.at(name, revision)
        file = tree.get(unquote(path))
        if file is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": oid}
            self.answer(404, b"Entry not found", headers, "text/plain")
            return
        headers = {"ETag": f'"{file.sha256 or file.oid}"', "X-Repo-Commit": oid}
        xet_hash = self.hub.xet_files.get(file.sha256, (None,))[0]
        if file.sha256:
            headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
        if xet_hash:
            token = f"{self.hub.endpoint}/api/models/{name}/xet-read-token/{oid}"
            headers |= {"X-Xet-Hash": xet_hash, "Link": f'<{token}>; rel="xet-auth"'}
            if self.command == "HEAD":
                self.answer(200, b"", headers | {"Content-Length": str(file.size)}, "application/octet-stream")
                return
        self.answer(200, file.data, headers, "application/octet-stream")

    def preupload(self, name: str, revision: str) -> None:
        """Say which files are large, and which are here already."""
        _, _, tree = self.at(name, revision, write=True)
        files = []
        for asked in json.loads(self.body)["files"]:
            mode, here = "lfs" if asked["path"].endswith(LARGE) else "regular", tree.get(asked["path"])
            oid = None if here is None else here.sha256 or here.oid
            files.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": files})

    def commit(self, name: str, revision: str) -> None:
        repo, parent, tree = self.at(name, revision, write=True)
        tree, header = dict(tree), {}
        for line in filter(bytes.strip, self.body.splitlines()):
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                header = value
            elif key == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                assert self.hub.has(value["oid"]), "a commit of a large file that has not arrived"
                tree[value["path"]] = File(b"", value["oid"], self.hub.xet_files[value["oid"]][1])
            elif key == "deletedFile":
                tree.pop(value["path"], None)
        if header.get("parentCommit") not in (None, parent) and "create_pr" not in self.query:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        answer, ref = {"success": True, "hookOutput": ""}, unquote(revision)
        if "create_pr" in self.query:
            number = len(repo.pull_requests()) + 1
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{name}/discussions/{number}"
        oid = repo.commit(ref, tree)
        self.answer(200, answer | {"commitOid": oid, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}"})

    def xet_token(self, name: str) -> None:
        """Send clients to the folder that stands for Xet's storage."""
        self.repo(name)
        place, until = f"local://{self.hub.xet_folder}", int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": place, "X-Xet-Access-Token": "token", "X-Xet-Token-Expiration": str(until)}
        self.answer(200, {"accessToken": "token", "exp": until, "casUrl": place}, headers)


def _entry(path: str, file: File) -> dict:
    entry = {"type": "file", "oid": file.oid, "size": file.size, "path": path}
    return entry | ({"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 130}} if file.sha256 else {})


def _scan_shards(folder: Path) -> dict[str, tuple[str, int]]:
    """Return SHA-256 -> (Xet's hash, size) from the shards that hf_xet wrote; records of 48 bytes (hub-docs, xet/shard.md)."""

    def as_text(raw: bytes) -> str:  # Xet writes its hashes as four little-endian numbers
        return b"".join(raw[start : start + 8][::-1] for start in range(0, 32, 8)).hex()

    found = {}
    for shard in folder.rglob("*.mdb"):
        data, place = shard.read_bytes(), 48
        while place + 48 <= len(data):
            file_hash = data[place : place + 32]
            flags, terms = struct.unpack_from("<II", data, place + 32)
            place += 48
            if file_hash == b"\xff" * 32:
                break
            size = sum(struct.unpack_from("<I", data, place + 48 * term + 36)[0] for term in range(terms))
            place += 48 * terms * (2 if flags & 1 << 31 else 1)
            if flags & 1 << 30:
                sha256 = data[place : place + 32]
                place += 48
                found[sha256.hex()] = found[as_text(sha256)] = (as_text(file_hash), size)
    return found
