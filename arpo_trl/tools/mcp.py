"""The tools of an MCP server (Model Context Protocol), over stdio or streamable HTTP, through the official SDK.

```yaml
tools:
- name: mcp
  arguments: {command: python -m my_tools.server, env: [WEATHER_KEY]}
- name: mcp
  arguments: {url: "https://tools.example.com/mcp", headers: {Authorization: TOOLS_AUTHORIZATION}, tools: [lookup]}
```
"""

import base64
import binascii
import io
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mcp import MCPError
from mcp.types import INTERNAL_ERROR, PARSE_ERROR, REQUEST_TIMEOUT, CallToolResult, Tool
from PIL import Image, UnidentifiedImageError

from .contract import InfrastructureError, ToolError
from .mcp_session import MCPSession, over_http, over_stdio


# Faults of the server; with other codes it answers what the call itself got wrong.
_SERVER_FAULTS = (INTERNAL_ERROR, PARSE_ERROR, REQUEST_TIMEOUT)
MAX_PAGES = 100


class MCPTools:
    """The tools that an MCP server offers, under its names, with its descriptions and schemas.

    A server that dies, or shows no sign of life after a call was given up, is started (over HTTP: connected to) again
    by the next call. Calls that cannot reach it are infrastructure failures, which the runner makes again as often as
    the tool's `max_retries` says; set that to 0 for tools that must not be called twice. Each process of a run starts
    a server of its own.

    Args:
        command (`str` or `Sequence[str]`, *optional*):
            Starts a server that speaks over stdin and stdout. `python` stands for the interpreter that trains.
        url (`str`, *optional*):
            Of a server that listens for streamable HTTP. Either this or `command`.
        env (`Sequence[str]`, *optional*):
            Names of the environment variables that the server's process gets. Of the others it gets only PATH, HOME,
            LOGNAME, SHELL, TERM and USER.
        headers (`Mapping[str, str]`, *optional*):
            HTTP headers, each with the name of the environment variable that holds its value.
        tools (`Sequence[str]`, *optional*):
            Offer only these of the server's tools.
        prefix (`str`, *optional*, defaults to `""`):
            Put before the tools' names, to tell those of several servers apart.
        start_timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds the server may take to start.
        max_restarts (`int`, *optional*, defaults to `10`):
            How often it is started again within a minute. Beyond that, calls fail at once until the minute is over.

    Raises:
        `ValueError`: for arguments that do not go together, and for environment variables that are not set.
        [`InfrastructureError`]: where there is no such command.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        url: str | None = None,
        env: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        prefix: str = "",
        start_timeout_s: float = 60.0,
        max_restarts: int = 10,
    ):
        if (command is None) == (url is None):
            raise ValueError("An MCP server needs either a `command` that starts it or the `url` where it listens.")
        if env and url is not None:
            raise ValueError("`env` is for a server started by `command`; one at a `url` has its own.")
        if headers and command is not None:
            raise ValueError(
                "`headers` are for a server at a `url`; give one started by `command` what it needs in `env`."
            )
        if start_timeout_s <= 0 or max_restarts < 0:
            raise ValueError("`start_timeout_s` must be positive and `max_restarts` at least 0.")
        if url is not None:
            label = f"MCP server at {url}"
            values = _environment(list((headers or {}).values()), label)
            connect = partial(over_http, url, {name: values[variable] for name, variable in (headers or {}).items()})
        else:
            assert command is not None  # as was just asked
            words = shlex.split(command) if isinstance(command, str) else list(command)
            label = f"MCP server '{shlex.join(words)}'"
            connect = partial(over_stdio, _executable(words, label), _environment(env, label))
        self._label, self._names, self._prefix = label, tools, prefix
        self._session = MCPSession(label, connect, start_timeout_s, max_restarts)
        self._tools: list[MCPTool] | None = None

    def tools(self) -> list["MCPTool"]:
        """Asks the server for its tools, once.

        Raises:
            [`InfrastructureError`]: where the server cannot be reached.
            `ValueError`: where it has none, or lacks one that was named.
        """
        if self._tools is None:
            try:
                offered = self._list()
            except BaseException:
                self.close()
                raise
            self._tools = [MCPTool(self._session, offered[name], self._prefix) for name in self._names or offered]
        return list(self._tools)

    def preflight(self) -> None:
        """Lists the server's tools again; raises [`InfrastructureError`] where it does not answer."""
        self._list()

    def close(self) -> None:
        """Ends the session and the server's process."""
        self._session.close()

    def _list(self) -> dict[str, Tool]:
        try:
            offered = {tool.name: tool for tool in self._session.request_and_wait(_list_tools)}
        except MCPError as error:
            raise InfrastructureError(f"The {self._label} does not list its tools: {error}") from None
        if not offered:
            raise ValueError(f"The {self._label} offers no tools.")
        if missing := [name for name in self._names or () if name not in offered]:
            raise ValueError(f"The {self._label} has no tool {', '.join(missing)}; it has {', '.join(offered)}.")
        return offered


class MCPTool:
    """One tool of an MCP server: what [`contract`] asks of a tool.

    Args:
        session ([`MCPSession`]):
            With the server.
        tool (`mcp.types.Tool`):
            As the server lists it.
        prefix (`str`, *optional*, defaults to `""`):
            Put before its name.
    """

    def __init__(self, session: MCPSession, tool: Tool, prefix: str = ""):
        self._session, self._remote_name = session, tool.name
        self.name = self.__name__ = prefix + tool.name
        self.schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": tool.description or tool.title or "",
                "parameters": tool.input_schema,
            },
        }

    async def __call__(self, **arguments: Any) -> str | list[dict[str, Any]]:
        try:
            result = await self._session.request(lambda client: client.call_tool(self._remote_name, arguments))
        except MCPError as error:
            kind = InfrastructureError if error.code in _SERVER_FAULTS else ToolError
            raise kind(f"The {self._session.label} refused the call: {error}") from None
        content = read_content(result)
        if result.is_error:
            raise ToolError(content if isinstance(content, str) else str(content))
        return content


def read_content(result: CallToolResult) -> Any:
    """What a call brought as a tool returns it: text, content blocks where there are images, the structured result
    where there is nothing else.

    Raises:
        [`ToolError`]: for sound, for binary resources and for images that cannot be read.
    """
    if not result.content and result.structured_content is not None:
        return result.structured_content
    blocks = [_read_block(block) for block in result.content]
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return blocks


def _read_block(block: Any) -> dict[str, Any]:
    if block.type == "text":
        return {"type": "text", "text": block.text}
    if block.type == "image":
        return {"type": "image", "image": _read_image(block.data)}
    if block.type == "resource_link":
        return {"type": "text", "text": f"{block.name}: {block.uri}"}
    if block.type == "resource":
        if hasattr(block.resource, "text"):
            return {"type": "text", "text": block.resource.text}
        if (block.resource.mime_type or "").startswith("image/"):
            return {"type": "image", "image": _read_image(block.resource.blob)}
    raise ToolError(f"The tool answered with {block.type} content, which cannot be shown to the model.")


def _read_image(data: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        image.load()
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, binascii.Error) as error:
        raise ToolError(f"The tool answered with an image that cannot be read: {error}") from None
    return image


async def _list_tools(client: Any) -> list[Tool]:
    tools, cursor = [], None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _executable(words: list[str], label: str) -> list[str]:
    if not words:
        raise ValueError("The `command` of an MCP server is empty.")
    found = sys.executable if words[0] == "python" else shutil.which(words[0])
    if found is None:
        raise InfrastructureError(f"The {label} cannot be started: there is no command '{words[0]}'.")
    return [found, *words[1:]]


def _environment(names: Sequence[str], label: str) -> dict[str, str]:
    if isinstance(names, str):
        raise ValueError(f"`env` of the {label} must be a list of names, not text.")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"The {label} needs the environment variables {', '.join(missing)}, which are not set.")
    return {name: os.environ[name] for name in names}
