"""The tool `fetch_page`: the readable text of a web page, or what a model makes of it."""

from collections.abc import Callable
from typing import Any

from ..contract import ToolContext
from ..registry import construct
from .answers import question_of, run_check
from .pages import Page, PageReader, excerpt
from .summaries import Summariser


class FetchPage:
    """The tool `fetch_page`.

    Args:
        max_page_chars (`int`, *optional*, defaults to `5000`):
            Of a longer page the part is shown that has most of the words of what is looked for.
        preflight_url (`str`, *optional*):
            Page that is fetched before a model is loaded; by default `https://example.com`.
        pages (`dict`, *optional*):
            Arguments of [`PageReader`].
        summariser (`dict`, *optional*):
            Arguments of [`Summariser`]: a model reads the page, and its summary is the answer.
    """

    def __init__(
        self,
        max_page_chars: int = 5000,
        preflight_url: str = "https://example.com",
        pages: dict[str, Any] | None = None,
        summariser: dict[str, Any] | None = None,
    ):
        if max_page_chars < 1:
            raise ValueError("`max_page_chars` must be at least 1.")
        self.max_page_chars, self.preflight_url = max_page_chars, preflight_url
        self._page_options = dict(pages or {})
        self._reader = construct(PageReader, self._page_options, "`pages`")
        self._summariser = construct(Summariser, summariser, "`summariser`") if summariser is not None else None

    def tools(self) -> list[Callable]:
        """What the model may call."""
        return [self.fetch_page]

    def preflight(self) -> None:
        """Fetches `preflight_url`; raises [`InfrastructureError`] where that, or the summary of it, does not work."""
        run_check(self._check)

    async def _check(self) -> None:
        await self._answer(self.preflight_url, "what this page is for", "")

    def normalise_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """For the cache: what an answer depends on."""
        query = " ".join(arguments["query"].split())
        depends_on = {
            "url": arguments["url"].strip(),
            "query": query,
            "shape": [self.max_page_chars, self._page_options],
        }
        if self._summariser is not None:
            depends_on["summary"] = self._summariser.key()
        if self._summariser is not None or not query:
            depends_on["question"] = question_of(arguments.get("context"))
        return depends_on

    async def fetch_page(self, url: str, context: ToolContext, query: str = "") -> str:
        """
        Reads a web page.

        Args:
            url: The address of the page.
            query: What to look for on it, in a few words; if left out, the question.

        Returns:
            The text of the page, of a long page the part that fits the query best.
        """
        return await self._answer(url.strip(), query.strip(), question_of(context))

    async def _answer(self, url: str, query: str, question: str) -> str:
        text = await self._reader.read(url)
        if self._summariser is not None:
            return await self._summariser.summarise(question, query, [Page(url, text)])
        return excerpt(text, query or question, self.max_page_chars)
