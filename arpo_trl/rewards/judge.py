"""A language model as judge, behind any URL that speaks OpenAI's chat completions."""

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import tenacity

from .answers import extract_answer, final_part
from .conversation import final_turn, last_user_text
from .matching import MAX_ANSWER_CHARS, accepted_answers


logger = logging.getLogger(__name__)

_PROMPT = Path(__file__).with_name("judge_prompt.txt")
_STATED = r"\bverdict\b(?:\W*\bis\b)?[\W_]*\b(correct|incorrect)\b"
# A verdict begins its line or ends the reply; in the midst of a sentence it is talked about.
_VERDICT = re.compile(rf"^[\W_]*{_STATED}|{_STATED}[\W_]*\Z", re.IGNORECASE | re.MULTILINE)
_QUOTATION = re.compile(r'"[^"]*"|“[^”]*”|«[^»]*»|(?<!\w)\'[^\'\n]*\'(?!\w)')


def read_verdict(reply: str, prediction: str = "") -> bool | None:
    """
    The verdict of a judge's reply: the last one that begins a line or ends the reply. One in a quotation, in the
    judge's thinking or in a repetition of the judged answer is none, since the policy may have written it.

    Args:
        reply (`str`):
            A whole reply; one that was cut off has no verdict.
        prediction (`str`, *optional*):
            The judged answer.

    Returns:
        `bool` or `None`: `None` where no verdict is given.
    """
    reply = final_part(reply)
    if re.search(_STATED, prediction, re.IGNORECASE):
        reply = reply.replace(prediction, " quoted ")

    def unquoted(quotation: re.Match) -> str:
        line_start = reply.rfind("\n", 0, quotation.start()) + 1
        line_end = reply.find("\n", quotation.end())
        stands_alone = not reply[line_start : quotation.start()].strip() and not reply[
            quotation.end() : line_end if line_end >= 0 else None
        ].strip(" .")
        is_quoted = re.search(_STATED, quotation[0], re.IGNORECASE) and not stands_alone
        return " quoted " if is_quoted else quotation[0]

    verdicts = [first or last for first, last in _VERDICT.findall(_QUOTATION.sub(unquoted, reply))]
    return verdicts[-1].lower() == "correct" if verdicts else None


class _NoVerdict(Exception):
    """The judge answered, but without a verdict."""


class _CutOff(Exception):
    """The judge's reply ended at the token limit. Asked again it would be as long."""


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (408, 409, 425, 429) or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError | _NoVerdict)


class LLMJudge:
    """
    Reward 1 where a judge finds that the final answer says the same as an accepted one, 0 where not.

    Questions are asked side by side, transient failures are repeated with growing pauses, and verdicts are kept on
    disk. What could not be judged is `None`, never 0, so that a judge that is down does not punish.

    Args:
        model (`str`):
            Name of the model at the server.
        base_url (`str`):
            For example `"http://localhost:8000/v1"`.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable with the key. Where it is not set no key is sent.
        prompt_template (`str`, *optional*):
            Path of a text with `{question}`, `{answers}` and `{prediction}`, whose reply ends with "verdict: correct"
            or "verdict: incorrect".
        cache_dir (`str`, *optional*):
            Folder for verdicts, shared by processes. Without it nothing is kept.
        max_concurrency (`int`, *optional*, defaults to `32`):
            Most requests at a time.
        timeout_s (`float`, *optional*, defaults to `60.0`):
            Seconds for one request.
        max_attempts (`int`, *optional*, defaults to `4`):
            Most requests for one verdict.
        max_tokens (`int`, *optional*, defaults to `512`):
            Longest reply, in tokens, a reasoning judge's thinking included. One that is cut off gives no verdict.
        max_wait_s (`float`, *optional*, defaults to `10.0`):
            Longest pause between two requests for one verdict.
    """

    __name__ = "llm_judge"

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str = "OPENAI_API_KEY",
        prompt_template: str | None = None,
        cache_dir: str | None = None,
        max_concurrency: int = 32,
        timeout_s: float = 60.0,
        max_attempts: int = 4,
        max_tokens: int = 512,
        max_wait_s: float = 10.0,
    ):
        self.model = model
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.api_key_env = api_key_env
        self.template = Path(prompt_template or _PROMPT).read_text(encoding="utf-8")
        self.max_concurrency = max_concurrency
        self.timeout_s = timeout_s
        self.max_attempts = max_attempts
        self.max_tokens = max_tokens
        self.max_wait_s = max_wait_s
        self._cache = None
        if cache_dir is not None:
            import diskcache

            self._cache = diskcache.Cache(cache_dir, disk=diskcache.JSONDisk)

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str | list[dict[str, Any]]],
        ground_truth: Sequence[object],
        question: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """
        Judges the rows of a batch.

        Args:
            prompts (`list`):
                Prompts as messages or texts; the question is the last user message where there is no such column.
            completions (`list`):
                Rows as messages or texts.
            ground_truth (`list`):
                Accepted answers of each row.
            question (`list[str]`, *optional*):
                The questions.
        """
        questions = question or [last_user_text(prompt) for prompt in prompts]
        answers = [extract_answer(final_turn(completion)) for completion in completions]
        verdicts = await self.judge(questions, answers, ground_truth)
        return [None if verdict is None else float(verdict) for verdict in verdicts]

    async def judge(
        self, questions: Sequence[str], predictions: Sequence[str | None], ground_truths: Sequence[object]
    ) -> list[bool | None]:
        """
        Judges extracted answers.

        Args:
            questions (`Sequence[str]`):
                The questions.
            predictions (`Sequence[str | None]`):
                The answers; no answer is wrong without asking.
            ground_truths (`Sequence`):
                Accepted answers of each question; where there is none the verdict is `None`.

        Returns:
            `list[bool | None]`: `None` where no verdict could be had.
        """
        places = asyncio.Semaphore(self.max_concurrency)
        key = os.environ.get(self.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=self.timeout_s, headers=headers) as client:

            async def judge_one(question: str, prediction: str | None, ground_truth: object) -> bool | None:
                golds = accepted_answers(ground_truth)
                if not golds or not prediction:
                    return False if golds else None
                fields = {
                    "question": question,
                    "answers": "\n".join(golds),
                    "prediction": prediction[:MAX_ANSWER_CHARS],
                }
                prompt = re.sub(r"\{(question|answers|prediction)\}", lambda match: fields[match[1]], self.template)
                async with places:
                    return await self._verdict(client, prompt, fields["prediction"])

            rows = zip(questions, predictions, ground_truths, strict=True)
            return await asyncio.gather(*(judge_one(*row) for row in rows))

    async def _verdict(self, client: httpx.AsyncClient, prompt: str, prediction: str) -> bool | None:
        key = hashlib.sha256(json.dumps([self.model, self.url, prompt]).encode()).hexdigest()
        known = self._cache.get(key) if self._cache is not None else None
        if known is not None:
            return known
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.max_attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=self.max_wait_s),
            retry=tenacity.retry_if_exception(_is_transient),
            reraise=True,
        )
        try:
            verdict: bool = await retrying(self._ask, client, prompt, prediction)
        except (httpx.HTTPError, _NoVerdict, _CutOff, ValueError, KeyError, IndexError, TypeError) as error:
            logger.warning("The judge at %s gave no verdict: %s: %s", self.url, type(error).__name__, error)
            return None
        if self._cache is not None:
            self._cache.set(key, verdict)
        return verdict

    async def _ask(self, client: httpx.AsyncClient, prompt: str, prediction: str) -> bool:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        response = await client.post(self.url, json=body)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        reply = choice["message"]["content"] or ""
        if choice.get("finish_reason") == "length":
            raise _CutOff(f"the reply was cut off; raise `max_tokens` ({self.max_tokens}): {reply[-200:]!r}")
        verdict = read_verdict(reply, prediction)
        if verdict is None:
            raise _NoVerdict(f"no verdict in {reply[-200:]!r}")
        return verdict
