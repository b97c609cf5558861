"""An MCP server for tests, made with the SDK: `python mcp_server.py`, or `python mcp_server.py PORT` for HTTP."""

import asyncio
import io
import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from PIL import Image as Picture


server = MCPServer("test", log_level="ERROR")


@server.tool()
def add(a: int, b: int = 10) -> int:
    """Adds two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@server.tool()
async def wait(seconds: float, note: str = "") -> str:
    """Answers later."""
    await asyncio.sleep(seconds)
    return note or "done"


arrived: list[asyncio.Event] = []


@server.tool()
async def meet(number: int) -> str:
    """Answers when so many calls of it are waiting at once."""
    arrived.append(asyncio.Event())
    if len(arrived) == number:
        for event in arrived:
            event.set()
    await arrived[0].wait()
    return f"{number} met"


@server.tool()
async def freeze(fifo: str = "") -> str:
    """Takes the whole server, which then answers nobody."""
    if fifo:
        Path(fifo).write_text("hangs")
    time.sleep(3600)
    return "thawed"


@server.tool()
def fail(reason: str) -> str:
    """Goes wrong."""
    raise ToolError(reason)


@server.tool()
def crash() -> str:
    """Ends the server in the middle of a call."""
    os._exit(3)


@server.tool()
def picture(colour: str) -> list:
    """A picture and a word on it."""
    data = io.BytesIO()
    Picture.new("RGB", (12, 8), colour).save(data, format="PNG")
    return [f"all {colour}", Image(data=data.getvalue(), format="png")]


@server.tool()
def whoami(context: Context) -> dict:
    """What the server is given."""
    return {"pid": os.getpid(), "env": sorted(os.environ), "headers": dict(context.headers or {})}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
