"""A search service on loopback that fails as services do: what `soak.py` asks over HTTP."""

import asyncio
import json
import threading
from urllib.parse import parse_qs, urlsplit


class FaultyServer:
    """Answers `POST /retrieve` as a retrieval server and `GET /search` as SearXNG, while it is a context.

    The first word of a query says what is wrong: `429` and `500` are the status of its first answer, the second one is
    right; `hang` has no answer while the server lives; `cut` breaks off in the middle of the JSON. Other queries are
    answered with themselves.
    """

    def __enter__(self) -> "FaultyServer":
        self._loop, self._failed = asyncio.new_event_loop(), set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-server", daemon=True)
        self._thread.start()
        serving = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exception) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client went away, or the server ends
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Reads a request and answers it; whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        (_, target), fields = head.split()[:2], dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        query = json.loads(body)["queries"][0] if body else parse_qs(urlsplit(target).query)["q"][0]
        fault, asked = query.split()[0], (bool(body), query)
        if fault == "hang":
            await reader.read()  # until the client gives up
            return False
        if fault in ("429", "500") and asked not in self._failed:
            self._failed.add(asked)
            writer.write(f"HTTP/1.1 {fault} Fault\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n".encode())
            return True
        self._failed.discard(asked)
        passage = {"document": {"contents": f"Echo\n{query}"}, "score": 1.0}
        result = {"title": "Echo", "url": "http://echo.test", "content": query}
        text = json.dumps({"result": [[passage]]} if body else {"results": [result]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text))
        writer.write(text[: len(text) // 2] if fault == "cut" else text)
        await writer.drain()
        return fault != "cut"
