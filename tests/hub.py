"""A Hugging Face Hub on 127.0.0.1 for tests: what the real client sends to push, pull and open pull requests on models,
and to read data sets, which are repositories whose name begins with datasets/.

    with serve(os.environ["HF_ENDPOINT"]) as hub:  # which the client reads when it is imported
        hub.fail_next("POST", "/commit/", 503)

Every file arrives inside its commit, as small ones do on the real Hub: how large ones are stored is between client and server.
Nothing here is the real server: what it answers was recorded from what clients accept.
"""

import base64
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

Tree = dict[str, bytes]  # files by path


class Repo:
    """One model or data set: commits, each with all of its files, and the names that point at them."""

    def __init__(self, files: Tree | None = None, *, private: bool = False):
        self.private = private
        self.commits: dict[str, Tree] = {}
        self.refs: dict[str, str] = {}
        self.commit("main", files or {".gitattributes": b""})

    def commit(self, ref: str, files: Tree) -> str:
        """Add a commit and point a name at it."""
        oid = self.refs[ref] = secrets.token_hex(20)
        self.commits[oid] = files
        return oid

    def add(self, path: str, data: bytes) -> None:
        """Write a file, as somebody else would."""
        self.commit("main", self.files() | {path: data})

    def resolve(self, revision: str) -> str | None:
        """Return the commit that a branch, a pull request or a hash stands for."""
        revision = unquote(revision).removeprefix("refs/heads/")
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> Tree:
        return self.commits[self.resolve(revision)]

    def pull_requests(self) -> list[str]:
        return [ref for ref in self.refs if ref.startswith("refs/pr/")]


class Refusal(Exception):
    """An error as the real Hub words it: status, message and the code that clients read from a header."""

    def __init__(self, status: int, message: str, code: str = ""):
        self.status, self.message, self.code = status, message, code


class Hub:
    def __init__(self, endpoint: str):
        self.endpoint, self.lock, self.requests = endpoint, threading.RLock(), 0
        self.users = {"hf_tester": "tester"}  # token -> name
        self.repos: dict[str, Repo] = {}
        self.planned: list[tuple[str, str, Callable[[Handler], bool | None]]] = []  # method, path; True: all was answered

    def fail_next(self, method: str, pattern: str, status: int, *, times: int = 1, **headers: str) -> None:
        """Answer the next requests of this method, whose path matches, with an error; 0 cuts the connection."""
        self.planned += [(method, pattern, partial(Handler.fail, status=status, headers=headers))] * times

    def before_next(self, method: str, pattern: str, action: Callable[["Handler"], None]) -> None:
        """Do something, as somebody else would, right before the next request of this method, whose path matches."""
        self.planned.append((method, pattern, action))


@contextmanager
def serve(endpoint: str):
    hub, address = Hub(endpoint), ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    with ThreadingHTTPServer(address, type("BoundHandler", (Handler,), {"hub": hub})) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()


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

    do_GET = do_POST = do_HEAD = handle_any

    def route(self, path: str) -> None:
        routes = (
            (r"/api/validate-yaml", lambda: self.answer(200, {"errors": [], "warnings": []})),
            (r"/api/repos/create", self.create),
            (r"/((?:datasets/)?[^/]+/[^/]+)/resolve/(refs(?:/|%2F)pr(?:/|%2F)\d+|[^/]+)/(.+)", self.resolve),
            (r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(?:/revision/(.+))?", self.info),
            (r"/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", self.tree),
            (r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self.preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/(.+)", self.commit),
        )
        for pattern, action in routes:
            if found := re.fullmatch(pattern, path):
                action(*found.groups())
                return
        raise Refusal(404, f"the test's Hub has no {self.command} {path}")

    def at(self, name: str, revision: str | None, *, write: bool = False) -> tuple[Repo, str, Tree]:
        """Return a repository that this user may read, or write to, and the commit and the files of a revision of it."""
        repo, owner = self.hub.repos.get(name), name.split("/")[-2]
        if repo is None or (repo.private and self.user != owner):
            raise Refusal(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and self.user != owner and "create_pr" not in self.query:
            raise Refusal(403, "You don't have the rights to create a commit. Pass `create_pr=1` to create a Pull Request.")
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
        repo, oid, files = self.at(name, revision)
        facts = {"id": name.removeprefix("datasets/"), "modelId": name, "sha": oid, "private": repo.private, "tags": []}
        self.answer(200, facts | {"siblings": [{"rfilename": path} for path in sorted(files)]})

    def tree(self, name: str, revision: str, folder: str | None) -> None:
        _, _, files = self.at(name, revision)
        inside = f"{unquote(folder)}/" if folder else ""
        below = {path.removeprefix(inside): path for path in sorted(files) if path.startswith(inside)}
        deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        found = [
            {"type": "file", "oid": _oid(files[path]), "size": len(files[path]), "path": path}
            for short, path in below.items()
            if deep or "/" not in short
        ]
        if not deep:
            folders = sorted({inside + short.split("/")[0] for short in below if "/" in short})
            found += [{"type": "directory", "path": one, "oid": "0" * 40, "size": 0} for one in folders]
        self.answer(200, found)

    def resolve(self, name: str, revision: str, path: str) -> None:
        _, oid, files = self.at(name, revision)
        data = files.get(unquote(path))
        if data is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        self.answer(200, data, {"X-Repo-Commit": oid, "ETag": f'"{_oid(data)}"'}, "application/octet-stream")

    def preupload(self, name: str, revision: str) -> None:
        """Say which files are here already."""
        _, _, files = self.at(name, revision, write=True)
        paths = [asked["path"] for asked in json.loads(self.body)["files"]]
        found = [{"path": path, "oid": _oid(files[path]) if path in files else None} for path in paths]
        self.answer(200, {"files": [{"uploadMode": "regular", "shouldIgnore": False} | one for one in found]})

    def commit(self, name: str, revision: str) -> None:
        repo, parent, files = self.at(name, revision, write=True)
        files, header = dict(files), {}
        for line in filter(bytes.strip, self.body.splitlines()):
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                header = value
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                files.pop(value["path"], None)
        if header.get("parentCommit") not in (None, parent) and "create_pr" not in self.query:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        answer, ref = {"success": True, "hookOutput": ""}, unquote(revision)
        if "create_pr" in self.query:
            number = len(repo.pull_requests()) + 1
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{name}/discussions/{number}"
        oid = repo.commit(ref, files)
        self.answer(200, answer | {"commitOid": oid, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}"})


def _oid(data: bytes) -> str:
    """Return the hash that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
