"""A small MCP server, made with the official SDK, for recipes that show one: `python -m arpo_trl.demo.mcp_server`, with a
port behind it for streamable HTTP on loopback."""

import sys
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field


LARGEST = 10**12

server = MCPServer("numbers", log_level="ERROR")


@server.tool()
def factorize(number: Annotated[int, Field(description=f"At least 2, at most {LARGEST}.")]) -> str:
    """Prime factors of a whole number."""
    if not 2 <= number <= LARGEST:
        raise ToolError(f"the number must be at least 2 and at most {LARGEST}")
    factors, rest, candidate = [], number, 2
    while candidate * candidate <= rest:
        while rest % candidate == 0:
            factors.append(candidate)
            rest //= candidate
        candidate += 1 if candidate == 2 else 2
    if rest > 1:
        factors.append(rest)
    return f"{number} = {' * '.join(map(str, factors))}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
