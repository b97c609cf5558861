"""Web pages as readable text, within limits of size and time, from public addresses only."""

import asyncio
import codecs
import re
from dataclasses import dataclass

import httpx

from ..contract import ToolError
from .addresses import PublicTransport


READABLE = ("text/html", "application/xhtml+xml", "text/plain", "text/markdown")
MAX_REDIRECTS = 5
# What a decoder makes of one chunk from the network is bounded for these, at about a thousand times its size.
_ENCODINGS = "gzip, deflate"


@dataclass(frozen=True)
class Page:
    """What could be read at an address: `text`, or the reason why not in `error`."""

    url: str
    text: str = ""
    error: str | None = None


class PageReader:
    """Fetches web pages and extracts what a person would read on them.

    Args:
        timeout_s (`float`, *optional*, defaults to `10.0`):
            Seconds for one page from first to last byte, redirects included.
        max_bytes (`int`, *optional*, defaults to `2_000_000`):
            Bytes of a page, unpacked, that are read; the rest is left.
        allow_private_addresses (`bool`, *optional*, defaults to `False`):
            Also fetch from private, loopback and link-local addresses. The model chooses what is fetched: with this it
            reaches whatever the machine reaches, a cloud's metadata included. For tests and closed networks.
        user_agent (`str`, *optional*, defaults to `"Mozilla/5.0 (compatible; arpo-trl)"`):
            What the pages' servers are told.
    """

    def __init__(
        self,
        timeout_s: float = 10.0,
        max_bytes: int = 2_000_000,
        allow_private_addresses: bool = False,
        user_agent: str = "Mozilla/5.0 (compatible; arpo-trl)",
    ):
        if timeout_s <= 0 or max_bytes < 1:
            raise ValueError("A page's `timeout_s` and `max_bytes` must be positive.")
        try:
            import trafilatura
        except ImportError:
            raise ImportError('Reading pages needs trafilatura: run `pip install "arpo-trl[search]"`.') from None
        self._extract = trafilatura.extract
        self.timeout_s, self.max_bytes = timeout_s, max_bytes
        self.allow_private_addresses = allow_private_addresses
        self._headers = {
            "User-Agent": user_agent,
            "Accept": ", ".join(READABLE),
            "Accept-Encoding": _ENCODINGS,
        }

    async def read(self, url: str) -> str:
        """The readable text of a page.

        Args:
            url (`str`):
                Its address, `http` or `https`.

        Raises:
            [`ToolError`]: where it cannot be had, with the reason. The address may be the model's, so no failure is
            one of the infrastructure.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                content, kind, charset = await self._fetch(url)
        except TimeoutError:
            raise ToolError(f"{url} took longer than {self.timeout_s:g} s.") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ToolError(f"{url} cannot be read: {error or type(error).__name__}") from None
        if kind in ("text/plain", "text/markdown"):
            text: str | None = content.decode(charset or "utf-8", "replace")
        else:
            html = content.decode(charset, "replace") if charset else content
            text = await asyncio.to_thread(self._extract, html, include_comments=False)
        if not text or not text.strip():
            raise ToolError(f"{url} has no readable text.")
        return text.strip()

    async def read_all(self, urls: list[str]) -> list[Page]:
        """Pages side by side, in the order of `urls`; one that cannot be read says why."""

        async def one(url: str) -> Page:
            try:
                return Page(url, await self.read(url))
            except ToolError as error:
                return Page(url, error=str(error))

        return list(await asyncio.gather(*map(one, urls)))

    async def _fetch(self, url: str) -> tuple[bytes, str, str | None]:
        """Content, content type and character set, if it is named."""
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise ToolError(f"{url!r} is not the address of a page; it begins with http:// or https://.")
        # Of its own for every page: cookies of one must not go to another.
        async with (
            httpx.AsyncClient(
                transport=PublicTransport(self.allow_private_addresses),
                headers=self._headers,
                timeout=self.timeout_s,
                follow_redirects=True,
                max_redirects=MAX_REDIRECTS,
            ) as client,
            client.stream("GET", parsed) as response,
        ):
            if not response.is_success:
                raise ToolError(f"{url} answered {response.status_code} {response.reason_phrase}.")
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind not in READABLE:
                raise ToolError(f"{url} is of type {kind or 'unknown'}, which cannot be read as text.")
            if response.headers.get("Content-Encoding", "identity").lower() not in ("identity", "gzip", "deflate"):
                raise ToolError(f"{url} is packed in a way that was not asked for.")
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) >= self.max_bytes:
                    break
            return bytes(content[: self.max_bytes]), kind, _known(response.charset_encoding)


def _known(charset: str | None) -> str | None:
    try:
        return codecs.lookup(charset).name if charset else None
    except LookupError:
        return None


def excerpt(text: str, about: str, limit: int) -> str:
    """The part of a text, at most `limit` characters of whole lines where that is possible, that has most of the words
    of `about`; its beginning where no part has any.

    Args:
        text (`str`):
            Lines are its paragraphs.
        about (`str`):
            For example the query and the snippet that led to the page.
        limit (`int`):
            Longest excerpt, in characters.
    """
    if len(text) <= limit:
        return text
    wanted = set(_words(about))
    pieces = [line[begin : begin + limit] for line in text.split("\n") for begin in range(0, len(line), limit)]
    hits = [len(wanted.intersection(_words(piece))) for piece in pieces]
    if not any(hits):
        return "\n".join(pieces)[:limit]
    windows = []  # (hits, first piece, end), one for every end, each as long as `limit` allows
    start = length = score = 0
    for end, piece in enumerate(pieces):
        length, score = length + len(piece) + 1, score + hits[end]
        while length - 1 > limit:
            length, score, start = length - len(pieces[start]) - 1, score - hits[start], start + 1
        windows.append((score, start, end + 1))
    most = max(score for score, _, _ in windows)
    best = [window for window in windows if window[0] == most]
    _, start, end = best[len(best) // 2]  # the middle one of equals has what was found in its middle
    return "\n".join(pieces[start:end])


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if len(word) > 2]
