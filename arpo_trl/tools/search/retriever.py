"""The tool `search` over a retrieval server that speaks the HTTP API of Search-R1's.

`POST /retrieve` takes `{"queries": [...], "topk": 3, "return_scores": true}` and answers with one list per query:
`{"result": [[{"document": {"contents": "\\"Title\\"\\ntext"}, "score": 0.9}, ...]]}`; servers that ignore
`return_scores` leave out the level of `document`.
"""

from collections.abc import Callable
from typing import Any

from ..contract import InfrastructureError
from .answers import checked_query, numbered, run_check
from .service import JSONService


class RetrieverSearch:
    """The tool `search` over a retrieval server.

    Args:
        url (`str`):
            The server, e.g. `"http://localhost:8000"`; `/retrieve` is appended where it does not end so.
        top_k (`int`, *optional*, defaults to `3`):
            Passages per answer.
        max_passage_chars (`int`, *optional*, defaults to `1000`):
            Longer passages are shortened.
        request_timeout_s (`float`, *optional*, defaults to `25.0`):
            Longest wait for one answer. A request that was given up is not sent again: the server would still be at work
            on it. Keep it below the tool's `timeout_s`, which bounds the call with its retries.
        api_key_env (`str`, *optional*):
            Environment variable with a key, sent as a bearer token.
    """

    def __init__(
        self,
        url: str,
        top_k: int = 3,
        max_passage_chars: int = 1000,
        request_timeout_s: float = 25.0,
        api_key_env: str | None = None,
    ):
        if top_k < 1 or max_passage_chars < 1:
            raise ValueError("`top_k` and `max_passage_chars` must be at least 1.")
        self.top_k, self.max_passage_chars = top_k, max_passage_chars
        self._server = JSONService(
            "The retrieval server", url.rstrip("/").removesuffix("/retrieve"), api_key_env, timeout_s=request_timeout_s
        )

    def tools(self) -> list[Callable]:
        """What the model may call."""
        return [self.search]

    def preflight(self) -> None:
        """One real search; raises [`InfrastructureError`] where the server does not answer as it should."""
        run_check(self._check)

    async def _check(self) -> None:
        if not await self.retrieve("encyclopedia"):
            raise InfrastructureError("The retrieval server finds no passage at all; has it loaded its index?")

    def normalise_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """For the cache: what an answer depends on."""
        query = " ".join(arguments["query"].split())
        return {"query": query, "server": self._server.url, "shape": [self.top_k, self.max_passage_chars]}

    async def retrieve(self, query: str) -> list[tuple[float | None, str]]:
        """Scores, where the server sends them, and contents of the best `top_k` passages, best first.

        Raises:
            [`InfrastructureError`]: where the server does not answer as it should.
        """
        body = {"queries": [query], "topk": self.top_k, "return_scores": True}
        payload = await self._server.ask("POST", "/retrieve", json=body)
        try:
            (found,) = payload["result"]
            return [_passage(entry) for entry in found[: self.top_k]]
        except (KeyError, TypeError, ValueError):
            raise self._server.malformed(payload) from None

    async def search(self, query: str) -> str:
        """
        Searches a collection of text passages and returns the best matches.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages found, best first.
        """
        found = await self.retrieve(checked_query(query))
        return numbered([text for _, text in found], self.max_passage_chars)


def _passage(entry: dict[str, Any]) -> tuple[float | None, str]:
    document = entry.get("document", entry) if isinstance(entry, dict) else {}
    text = document.get("contents", document.get("text"))
    if not isinstance(text, str):
        raise ValueError("no text")
    if "contents" not in document and document.get("title"):
        text = f"{document['title']}\n{text}"
    return entry.get("score"), text
