"""The tool `search` over a web search service, on request with the pages behind the results, or what a model makes of
them."""

from collections.abc import Callable
from typing import Any

from ..contract import InfrastructureError, ToolContext, ToolError
from ..registry import construct
from .answers import checked_query, numbered, question_of, run_check
from .pages import Page, PageReader, excerpt
from .providers import PROVIDERS, WebResult
from .service import JSONService
from .summaries import Summariser


# What the services take; of a longer query some make an error.
MAX_QUERY_CHARS = 400


class WebSearch:
    """The tool `search` over a web search service.

    Args:
        provider (`str`):
            `"serper"`, `"brave"`, `"tavily"`, `"brightdata"` or `"searxng"`, see `arpo_trl.tools.search.providers`.
        url (`str`, *optional*):
            Where the service is, if not where its provider has it; SearXNG needs it.
        api_key_env (`str`, *optional*):
            Environment variable with the key, if not the provider's (`SERPER_API_KEY`, `BRAVE_API_KEY`,
            `TAVILY_API_KEY`, `BRIGHTDATA_API_KEY`; none for SearXNG).
        parameters (`dict`, *optional*):
            The service's own parameters, sent with every query.
        top_k (`int`, *optional*, defaults to `5`):
            Results per answer.
        max_passage_chars (`int`, *optional*, defaults to `1000`):
            Longer results are shortened; of a page that was read, the part is shown that has most of the words of
            query and snippet.
        request_timeout_s (`float`, *optional*, defaults to `10.0`):
            Longest wait for one answer of the service.
        read_pages (`int`, *optional*, defaults to `0`):
            Of so many results, the first ones, the page itself is fetched.
        pages (`dict`, *optional*):
            Arguments of [`PageReader`].
        summariser (`dict`, *optional*):
            Arguments of [`Summariser`]: a model reads the pages, and its summary is the answer.
    """

    def __init__(
        self,
        provider: str,
        url: str | None = None,
        api_key_env: str | None = None,
        parameters: dict[str, Any] | None = None,
        top_k: int = 5,
        max_passage_chars: int = 1000,
        request_timeout_s: float = 10.0,
        read_pages: int = 0,
        pages: dict[str, Any] | None = None,
        summariser: dict[str, Any] | None = None,
    ):
        if provider not in PROVIDERS:
            raise ValueError(f"Unknown `provider` {provider!r}; choose one of {', '.join(PROVIDERS)}.")
        if top_k < 1 or max_passage_chars < 1 or read_pages < 0:
            raise ValueError("`top_k` and `max_passage_chars` must be at least 1, `read_pages` at least 0.")
        if read_pages == 0 and (pages is not None or summariser is not None):
            raise ValueError("`pages` and `summariser` are for pages that are read: set `read_pages`, e.g. to 3.")
        self.provider, self._provider = provider, PROVIDERS[provider]()
        url = url or self._provider.url
        if url is None:
            raise ValueError(f"The provider {provider!r} needs `url`, the address of your own instance.")
        self.parameters = dict(parameters or {})
        if missing := [name for name in self._provider.required if name not in self.parameters]:
            raise ValueError(f"The provider {provider!r} needs `parameters` with {', '.join(missing)}.")
        self._provider.request("test", top_k, self.parameters)
        self.top_k, self.max_passage_chars, self.read_pages = top_k, max_passage_chars, read_pages
        self._service = JSONService(
            f"The search service '{provider}'",
            url,
            api_key_env or self._provider.key_env,
            self._provider.key_header,
            timeout_s=request_timeout_s,
            resend=True,
        )
        self._page_options = dict(pages or {})
        self._reader = construct(PageReader, self._page_options, "`pages`") if read_pages else None
        self._summariser = construct(Summariser, summariser, "`summariser`") if summariser is not None else None

    def tools(self) -> list[Callable]:
        """What the model may call."""
        return [self.search]

    def preflight(self) -> None:
        """One real search, with all that belongs to it; raises [`InfrastructureError`] where a part does not work."""
        run_check(self._check)

    async def _check(self) -> None:
        query = "encyclopedia"
        results = await self.results(query)
        if not results:
            raise InfrastructureError(f"The search service '{self.provider}' finds nothing for {query!r}.")
        if self._reader is not None:
            pages = await self._read(results)
            if all(page.error for page in pages):
                raise InfrastructureError(f"No page behind the results can be read: {pages[0].error}")
            if self._summariser is not None:
                await self._summary("", query, pages)

    def normalise_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """For the cache: what an answer depends on. The key is not part of it."""
        depends_on = {
            "query": " ".join(arguments["query"].split()),
            "service": [self.provider, self._service.url, self.parameters],
            "shape": [self.top_k, self.max_passage_chars, self.read_pages, self._page_options],
        }
        if self._summariser is not None:
            depends_on["summary"] = [self._summariser.key(), question_of(arguments.get("context"))]
        return depends_on

    async def results(self, query: str) -> list[WebResult]:
        """The service's results, best first, at most `top_k`.

        Raises:
            [`InfrastructureError`]: where the service does not answer as it should.
        """
        payload = await self._service.ask(**self._provider.request(query, self.top_k, self.parameters))
        try:
            return self._provider.results(payload)[: self.top_k]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise self._service.malformed(payload) from None

    async def search(self, query: str, context: ToolContext) -> str:
        """
        Searches the web and returns the best results.

        Args:
            query: What to look for, in a few words.

        Returns:
            The results found, best first.
        """
        query = checked_query(query)
        if len(query) > MAX_QUERY_CHARS:
            raise ToolError(
                f"The query has {len(query)} characters, {MAX_QUERY_CHARS} are allowed; write fewer words."
            )
        results = await self.results(query)
        pages = await self._read(results)
        if self._summariser is not None and not all(page.error for page in pages):
            return await self._summary(question_of(context), query, pages)
        texts = [self._text(result, page, query) for result, page in zip(results, pages, strict=False)]
        texts += [str(result) for result in results[len(pages) :]]
        return numbered(texts, self.max_passage_chars)

    async def _read(self, results: list[WebResult]) -> list[Page]:
        if self._reader is None:
            return []
        return await self._reader.read_all([result.url for result in results[: self.read_pages]])

    async def _summary(self, question: str, query: str, pages: list[Page]) -> str:
        assert self._summariser is not None  # asked for by who has one
        read = [page for page in pages if not page.error]
        summary = await self._summariser.summarise(question, query, read)
        return "\n".join([summary, *(f"[{number}] {page.url}" for number, page in enumerate(read, 1))])

    def _text(self, result: WebResult, page: Page, query: str) -> str:
        if page.error:
            return f"{result}\n(The page itself cannot be read: {page.error})"
        head = f"{result.title}\n{result.url}\n"
        room = max(1, self.max_passage_chars - len(head))
        return head + excerpt(page.text, f"{query} {result.snippet}", room)
