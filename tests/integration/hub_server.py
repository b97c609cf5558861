"""The part of the Hub's API that pushing and loading models needs, on loopback, with repositories in memory.

Every file is taken as a regular one, not through LFS or Xet, so it stands for the API, not for large transfers.
"""

import base64
import fnmatch
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


USER = "tester"
# As the Hub does, `base_model` must be the name of a repository.
BASE_MODEL = re.compile(r"^base_model: (.*)$", re.MULTILINE)
REPO = re.compile(r"[\w.-]+/[\w.-]+")


class HubServer:
    """Serves while it is a context.

    Attributes:
        repos (`dict[str, dict[str, dict[str, bytes]]]`):
            Files by repository and revision.
        visibility (`dict[str, str]`):
            What repositories were made as, where that was asked for.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.visibility: dict[str, str] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != "Bearer hf_test":
            self._answer(401, {"error": "Invalid token"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            self._preupload(json.loads(body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            repo = self.hub.repos[match[1]]
            status = 409 if match[2] in repo else 200
            repo.setdefault(match[2], {})
            self._answer(status, {} if status == 200 else {"error": "exists"})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(match[1], match[2], body)
        else:
            self._answer(404, {"error": f"no {path}"})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            self._answer(200, {"name": USER, "type": "user", "auth": {"accessToken": {"role": "write"}}})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._answer(404, {"error": f"no {path}"})

    do_HEAD = do_GET

    def _create(self, request: dict) -> None:
        name = f"{request.get('organization') or USER}/{request['name']}"
        status = 409 if name in self.hub.repos else 200
        if status == 200:
            self.hub.repos[name] = {"main": {}}
            self.hub.visibility[name] = request.get("visibility")
        self._answer(status, {"url": f"{self.hub.endpoint}/{name}", "id": name, "name": name})

    def _validate(self, content: str) -> None:
        names = [name.strip() for name in BASE_MODEL.findall(content)]
        errors = [{"message": f'"base_model" is no repository: {name}'} for name in names if not REPO.fullmatch(name)]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _preupload(self, request: dict) -> None:
        ignored = [line.strip("/") for line in request.get("gitIgnore", "").splitlines() if line]
        files = [
            {
                "path": file["path"],
                "uploadMode": "regular",
                "shouldIgnore": any(fnmatch.fnmatch(file["path"], f"{pattern}*") for pattern in ignored),
            }
            for file in request["files"]
        ]
        self._answer(200, {"files": files})

    def _commit(self, repo: str, revision: str, body: bytes) -> None:
        files = self.hub.repos[repo][revision]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        oid = self._oid(files)
        self._answer(200, {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{oid}", "commitOid": oid})

    def _info(self, repo: str, revision: str) -> None:
        files = self.hub.repos.get(repo, {}).get(revision)
        if files is None:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": name} for name in files]
        self._answer(200, {"id": repo, "modelId": repo, "sha": self._oid(files), "siblings": siblings, "tags": []})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        revisions = self.hub.repos.get(repo, {})
        by_oid = {self._oid(files): files for files in revisions.values()}
        files = revisions.get(revision, by_oid.get(revision))
        if files is None or name not in files:
            self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = files[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self._oid(files)}
        self._answer(200, content, headers)

    @staticmethod
    def _oid(files: dict[str, bytes]) -> str:
        return hashlib.sha1(repr(sorted((name, len(content)) for name, content in files.items())).encode()).hexdigest()

    def _answer(self, status: int, content: dict | list | bytes, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
