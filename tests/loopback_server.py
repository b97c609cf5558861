"""An HTTP server on loopback that answers as a test tells it."""

import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


@dataclass
class Asked:
    """A request as it came."""

    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class Reply:
    """What is answered. With `hangs` nothing is until the server is closed; with `drips` the body comes a byte at a time
    until then; `endless` follows the body over and over until nobody reads any more."""

    body: object = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    drips: bool = False
    endless: bytes = b""


class LoopbackServer:
    """Serves while it is a context.

    Args:
        reply (`Callable[[Asked], Reply | object]` or a list of replies):
            What is answered; of a list each reply once, the last one over and over. What is no [`Reply`] is JSON, or
            HTML where it is a text.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Where it listens.
        tls (`ssl.SSLContext`, *optional*):
            Serves HTTPS.
    """

    def __init__(self, reply, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, port: int = 0):
        self.reply: Callable | list = reply
        self.asked: list[Asked] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        here = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                here._answer(self)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass  # clients that went away

        self._server = Server((host, port), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"

    def __enter__(self) -> "LoopbackServer":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        params = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        asked = Asked(handler.command, url.path, params, dict(handler.headers), body)
        with self._lock:
            self.asked.append(asked)
            replies = self.reply
            reply = replies(asked) if callable(replies) else replies[min(len(self.asked), len(replies)) - 1]
        if not isinstance(reply, Reply):
            reply = Reply(reply)
        if reply.hangs:
            self.closing.wait()
            return
        content, kind = reply.body, "application/octet-stream"
        if isinstance(content, str):
            content, kind = content.encode(), "text/html; charset=utf-8"
        elif not isinstance(content, bytes):
            content, kind = json.dumps(content).encode(), "application/json"
        headers = {"Content-Type": kind, **reply.headers}
        if not reply.endless:
            headers["Content-Length"] = str(len(content))
        handler.send_response(reply.status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if reply.drips:
            for byte in content:
                handler.wfile.write(bytes([byte]))
                if self.closing.wait(0.02):
                    return
        else:
            handler.wfile.write(content)
            while reply.endless and not self.closing.is_set():
                handler.wfile.write(reply.endless)
