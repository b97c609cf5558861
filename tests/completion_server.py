"""A server that speaks as much of the completions API as the engine over HTTP needs, on loopback."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class CompletionServer(ThreadingHTTPServer):
    """Streams the ids of `reply` one a chunk, as `vllm serve` does.

    Attributes:
        sends_ids (`bool`):
            Whether with `token_ids` and `top_logprobs`.
        likeliest (`dict[str, float]`, *optional*):
            Tokens and logprobs of `top_logprobs`, beside the sampled one's.
        status (`int`):
            Answers with this status and no stream unless it is 200.
        waits (`threading.Event`, *optional*):
            Waited for after each chunk.
        closed_early (`threading.Event`):
            Set when a client went away in the middle of a stream.
    """

    daemon_threads = True

    def __init__(self, tokenizer, reply):
        self.tokenizer, self.reply, self.bodies = tokenizer, reply, []
        self.sends_ids, self.status, self.waits = True, 200, None
        self.likeliest = {"token_id:1": -1.5, "token_id:2": -3.0}
        self.closed_early = threading.Event()
        super().__init__(("127.0.0.1", 0), _CompletionHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _CompletionHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(json.dumps({"data": [{"id": "m", "max_model_len": 256}, {"id": "other"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.status != 200:
            self._send(b"overloaded", self.server.status)
            return
        self.send_response(200)
        self.end_headers()
        ids = self.server.reply(body)[: body["max_tokens"]]
        try:
            for index, token in enumerate(ids):
                stopped = token in body["stop_token_ids"]
                reason = "stop" if stopped else "length" if index + 1 == body["max_tokens"] else None
                choice = {"index": 0, "text": self.server.tokenizer.decode([token]), "finish_reason": reason}
                choice["logprobs"] = {"token_logprobs": [-0.5]}
                if self.server.sends_ids:
                    choice["token_ids"] = [token]
                    likeliest = self.server.likeliest and {f"token_id:{token}": -0.5, **self.server.likeliest}
                    if body["logprobs"]:
                        choice["logprobs"]["top_logprobs"] = [likeliest]
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                self.wfile.flush()
                if self.server.waits is not None:
                    self.server.waits.wait(10)
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            self.server.closed_early.set()

    def _send(self, payload, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


@contextmanager
def serve_tagged(model_dir: str) -> Iterator[CompletionServer]:
    """A server over the small tagged model's tokenizer that calls `search` once, then answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    call = tokenizer.encode("w1 <search> w2 w3 </search> w5 w5") + [tokenizer.eos_token_id]
    answer = tokenizer.encode("<answer> w1 </answer>") + [tokenizer.eos_token_id]
    result = tokenizer.convert_tokens_to_ids("</result>")
    server = CompletionServer(tokenizer, lambda body: answer if result in body["prompt"] else call)
    yield server
    server.shutdown()
    server.server_close()
