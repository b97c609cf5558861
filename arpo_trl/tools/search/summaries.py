"""Fetched pages, summed up by a model with the question in view, as the deep search of the papers does."""

import re
from collections.abc import Sequence
from pathlib import Path

from .pages import Page, excerpt
from .service import JSONService


_PROMPT = Path(__file__).with_name("summary_prompt.txt")


class Summariser:
    """Asks a model behind an OpenAI-compatible URL what fetched pages say about a question.

    Args:
        model (`str`):
            Name of the model at the server.
        base_url (`str`):
            For example `"http://localhost:8000/v1"`.
        api_key_env (`str`, *optional*):
            Environment variable with the key. Without it no key is sent.
        max_tokens (`int`, *optional*, defaults to `512`):
            Longest summary.
        max_page_chars (`int`, *optional*, defaults to `10_000`):
            Of a longer page the model reads the part that has most of the words of query and question.
        timeout_s (`float`, *optional*, defaults to `60.0`):
            Longest wait for the model.
        prompt_template (`str`, *optional*):
            Path of a text with `{question}`, `{query}` and `{pages}`.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str | None = None,
        max_tokens: int = 512,
        max_page_chars: int = 10_000,
        timeout_s: float = 60.0,
        prompt_template: str | None = None,
    ):
        if max_tokens < 1 or max_page_chars < 1:
            raise ValueError("A summariser's `max_tokens` and `max_page_chars` must be at least 1.")
        self.model, self.max_tokens, self.max_page_chars = model, max_tokens, max_page_chars
        self.template = Path(prompt_template or _PROMPT).read_text(encoding="utf-8")
        self._server = JSONService("The summarising model's server", base_url, api_key_env, timeout_s=timeout_s)

    def key(self) -> list:
        """What a summary depends on beside question, query and pages."""
        return [self.model, self._server.url, self.max_tokens, self.max_page_chars, self.template]

    async def summarise(self, question: str, query: str, pages: Sequence[Page]) -> str:
        """What the pages say about the question.

        Args:
            question (`str`):
                The user's; where it is not known the query stands for it.
            query (`str`):
                What the pages were searched for; where it is empty the question stands for it.
            pages (`Sequence[Page]`):
                Pages that could be read.

        Raises:
            [`InfrastructureError`]: where the model does not answer.
        """
        about = f"{query} {question}"
        texts = [
            f"[{number}] {page.url}\n{excerpt(page.text, about, self.max_page_chars)}"
            for number, page in enumerate(pages, 1)
        ]
        fields = {"question": question or query, "query": query or question, "pages": "\n\n".join(texts)}
        prompt = re.sub(r"\{(question|query|pages)\}", lambda match: fields[match[1]], self.template)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        payload = await self._server.ask("POST", "/chat/completions", json=body)
        try:
            summary = payload["choices"][0]["message"]["content"]
            # Models that think first are read from the end of their thoughts.
            return summary.rpartition("</think>")[2].strip()
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._server.malformed(payload) from None
