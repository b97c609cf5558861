"""Web search services behind one small interface: what to send for a query, how to read the answer."""

from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

from ..contract import InfrastructureError


@dataclass(frozen=True)
class WebResult:
    """One entry of a list of results."""

    title: str
    url: str
    snippet: str

    def __str__(self) -> str:
        return "\n".join(part for part in (self.title, self.url, self.snippet) if part)


class Provider(Protocol):
    """A web search service.

    Attributes:
        url (`str` or `None`):
            Where it is; `None` where every user runs their own.
        key_env (`str` or `None`):
            Environment variable with the key.
        key_header (`str`):
            Header for the key.
        required (`tuple[str, ...]`):
            Names that `parameters` must have.
    """

    url: str | None
    key_env: str | None
    key_header: str
    required: tuple[str, ...]

    def request(self, query: str, top_k: int, parameters: dict[str, Any]) -> dict[str, Any]:
        """Arguments of [`JSONService.ask`] that ask for `top_k` results. `parameters` are the service's own."""
        ...

    def results(self, payload: Any) -> list[WebResult]:
        """The results in the JSON of an answer, best first. May raise what reading raises (`KeyError`,
        `TypeError`, ...) for an answer of another form, and [`InfrastructureError`] for one that says it failed."""
        ...


class Serper(Provider):
    """Google by serper.dev. `parameters`: `gl` (country), `hl` (language), `location`, `tbs`, ..."""

    url = "https://google.serper.dev"
    key_env = "SERPER_API_KEY"
    key_header = "X-API-KEY"
    required = ()

    def request(self, query: str, top_k: int, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"method": "POST", "path": "/search", "json": {"q": query, "num": top_k, **parameters}}

    def results(self, payload: Any) -> list[WebResult]:
        return _read(_entries(payload, "organic", "searchParameters"), "title", "link", "snippet")


class Brave(Provider):
    """Brave Search. `parameters`: `country`, `search_lang`, `freshness`, ..."""

    url = "https://api.search.brave.com"
    key_env = "BRAVE_API_KEY"
    key_header = "X-Subscription-Token"
    required = ()

    def request(self, query: str, top_k: int, parameters: dict[str, Any]) -> dict[str, Any]:
        params = {"q": query, "count": min(top_k, 20), "text_decorations": "false", **parameters}
        return {"method": "GET", "path": "/res/v1/web/search", "params": params}

    def results(self, payload: Any) -> list[WebResult]:
        if payload["type"] != "search":
            raise ValueError("not an answer to a search")
        return _read(payload.get("web", {}).get("results", []), "title", "url", "description")


class Tavily(Provider):
    """Tavily. `parameters`: `search_depth`, `topic`, `include_domains`, ..."""

    url = "https://api.tavily.com"
    key_env = "TAVILY_API_KEY"
    key_header = "Authorization"
    required = ()

    def request(self, query: str, top_k: int, parameters: dict[str, Any]) -> dict[str, Any]:
        body = {"query": query, "max_results": min(top_k, 20), **parameters}
        return {"method": "POST", "path": "/search", "json": body}

    def results(self, payload: Any) -> list[WebResult]:
        return _read(payload["results"], "title", "url", "content")


class BrightData(Provider):
    """Bing or Google by Bright Data's SERP API, which the papers used. `parameters`: `zone` (required), `engine`
    (`"bing"` or `"google"`), and what that engine takes (`mkt`, `setlang`; `gl`, `hl`)."""

    url = "https://api.brightdata.com"
    key_env = "BRIGHTDATA_API_KEY"
    key_header = "Authorization"
    required = ("zone",)
    engines = {"bing": ("https://www.bing.com/search", "count"), "google": ("https://www.google.com/search", "num")}

    def request(self, query: str, top_k: int, parameters: dict[str, Any]) -> dict[str, Any]:
        parameters = dict(parameters)
        zone, engine = parameters.pop("zone"), parameters.pop("engine", "bing")
        if engine not in self.engines:
            raise ValueError(f"Unknown `engine` {engine!r}; choose one of {', '.join(self.engines)}.")
        page, count = self.engines[engine]
        target = urlencode({"q": query, count: top_k, "brd_json": 1, **parameters})
        return {
            "method": "POST",
            "path": "/request",
            "json": {"zone": zone, "url": f"{page}?{target}", "format": "raw"},
        }

    def results(self, payload: Any) -> list[WebResult]:
        return _read(_entries(payload, "organic", "general"), "title", "link", "description")


class SearXNG(Provider):
    """A SearXNG instance of one's own, with `json` among `search.formats` in its `settings.yml`. `parameters`:
    `engines`, `categories`, `language`, ..."""

    url = None
    key_env = None
    key_header = "Authorization"
    required = ()

    def request(self, query: str, top_k: int, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"method": "GET", "path": "/search", "params": {"q": query, "format": "json", **parameters}}

    def results(self, payload: Any) -> list[WebResult]:
        results = _read(payload["results"], "title", "url", "content")
        silent = ", ".join(f"{engine[0]} ({engine[1]})" for engine in payload.get("unresponsive_engines", []))
        if silent and not results:
            raise InfrastructureError(f"SearXNG found nothing, but these of its engines did not answer: {silent}.")
        return results


PROVIDERS: dict[str, type[Provider]] = {
    "serper": Serper,
    "brave": Brave,
    "tavily": Tavily,
    "brightdata": BrightData,
    "searxng": SearXNG,
}


def _entries(payload: Any, key: str, marker: str) -> list:
    """`payload[key]`, which services leave out where nothing was found; `marker` tells such an answer from others."""
    return payload.get(key, []) if marker in payload else payload[key]


def _read(entries: list[dict[str, Any]], title: str, url: str, snippet: str) -> list[WebResult]:
    if not isinstance(entries, list):
        raise TypeError("not a list")
    return [WebResult(*(str(entry.get(name) or "").strip() for name in (title, url, snippet))) for entry in entries]
