"""What an MCP server's answers become, without a server."""

import base64
import io

import pytest
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from PIL import Image

from arpo_trl.tools.contract import ToolError
from arpo_trl.tools.mcp import read_content


def png(colour: str) -> str:
    data = io.BytesIO()
    Image.new("RGB", (3, 2), colour).save(data, format="PNG")
    return base64.b64encode(data.getvalue()).decode()


def text(words: str) -> TextContent:
    return TextContent(type="text", text=words)


@pytest.mark.parametrize(
    ("content", "structured", "read"),
    [
        ([], None, ""),
        ([text("one"), text("two")], {"result": 1}, "one\ntwo"),
        ([], {"rows": [1, 2]}, {"rows": [1, 2]}),
        ([ResourceLink(type="resource_link", name="log", uri="file:///log")], None, "log: file:///log"),
        (
            [EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a", text="inside"))],
            None,
            "inside",
        ),
    ],
)
def test_text_links_and_structured_results(content, structured, read):
    assert read_content(CallToolResult(content=content, structured_content=structured)) == read


def test_images_stay_in_their_place():
    resource = BlobResourceContents(uri="file:///b.png", mime_type="image/png", blob=png("blue"))
    content = [
        ImageContent(type="image", data=png("red"), mime_type="image/png"),
        text("and"),
        EmbeddedResource(type="resource", resource=resource),
    ]
    first, words, second = read_content(CallToolResult(content=content))
    assert [first["type"], words, second["type"]] == ["image", {"type": "text", "text": "and"}, "image"]
    assert first["image"].getpixel((0, 0)) == (255, 0, 0) and second["image"].getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (AudioContent(type="audio", data="AAAA", mime_type="audio/wav"), "audio content"),
        (
            EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///c", blob="AAAA")),
            "resource content",
        ),
        (ImageContent(type="image", data="AAAA", mime_type="image/png"), "image that cannot be read"),
        (ImageContent(type="image", data="%%%", mime_type="image/png"), "image that cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_an_error(block, said):
    with pytest.raises(ToolError, match=said):
        read_content(CallToolResult(content=[block]))
