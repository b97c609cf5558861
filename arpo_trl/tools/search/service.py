"""A service that answers HTTP with JSON: one way to ask it, one way to fail."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from ..calling import TRANSIENT_STATUS, parse_retry_after
from ..contract import InfrastructureError


logger = logging.getLogger(__name__)

# Of what a service says about an error, the model and the log see this much.
SHOWN_CHARS = 200


class JSONService:
    """Asks a service and turns whatever goes wrong into [`InfrastructureError`].

    The key is read from the environment once. It goes into a header and nowhere else: messages that quote the service
    have it cut out, and URLs cannot carry one.

    Args:
        label (`str`):
            What messages call the service.
        url (`str`):
            Where it is.
        api_key_env (`str`, *optional*):
            Environment variable with the key; if `None`, no key is sent.
        key_header (`str`, *optional*, defaults to `"Authorization"`):
            Header for the key; `"Authorization"` carries it as a bearer token.
        timeout_s (`float`, *optional*, defaults to `10.0`):
            Longest wait for a connection, and for the service to go on answering.
        resend (`bool`, *optional*, defaults to `False`):
            Whether a request whose answer was not waited for any longer is sent again. A server of one's own is still
            at work on the first one then, and would have to answer both.

    Raises:
        `ValueError`: for a URL that cannot be used, or a variable that is not set.
    """

    def __init__(
        self,
        label: str,
        url: str,
        api_key_env: str | None = None,
        key_header: str = "Authorization",
        timeout_s: float = 10.0,
        resend: bool = False,
    ):
        self.label, self.url, self.timeout_s, self.resend = label, checked_url(url), timeout_s, resend
        self._waiting = self._given_up = 0
        self._key_env = api_key_env
        self._key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
        if api_key_env and not self._key:
            raise ValueError(f"{label} needs a key: set the environment variable {api_key_env}.")
        self._headers = {}
        if self._key:
            self._headers[key_header] = f"Bearer {self._key}" if key_header == "Authorization" else self._key
        # A client belongs to the event loop that it was first used on, and is closed with it.
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None]]] = {}

    async def ask(self, method: str, path: str = "", **request: Any) -> Any:
        """Sends a request and returns the JSON of the answer.

        Args:
            method (`str`):
                `"GET"` or `"POST"`.
            path (`str`, *optional*):
                Appended to the service's URL.
            request:
                As `httpx.AsyncClient.request` takes it (`json`, `params`).

        Raises:
            [`InfrastructureError`]: where there is no such answer. Trying again is worth it unless the service says
            that the request or the key is at fault.
        """
        client = await self._client()
        self._waiting += 1
        try:
            response = await client.request(method, self.url + path, **request)
        except httpx.ConnectTimeout:
            raise InfrastructureError(f"{self.label} took no connection within {self.timeout_s:g} s.") from None
        except httpx.TimeoutException:
            self._warn_of_load()
            raise InfrastructureError(
                f"{self.label} did not answer within {self.timeout_s:g} s.", retry=self.resend
            ) from None
        except httpx.HTTPError as error:
            raise InfrastructureError(
                f"{self.label} at {self.url} cannot be reached: {self._safe(str(error) or type(error).__name__)}"
            ) from None
        finally:
            self._waiting -= 1
        self._check(response)
        try:
            return response.json()
        except ValueError:
            said = self._safe(response.text)
            raise InfrastructureError(f"{self.label} did not answer with JSON: {said!r}") from None

    def _warn_of_load(self) -> None:
        """The first time, the tenth, the hundredth and so on."""
        self._given_up += 1
        if str(self._given_up).strip("0") == "1":
            logger.warning(
                "%s did not answer within %g s, %d times so far; %d requests were under way. If it is busy, lower the "
                "tool's `concurrency` or set a `rate_limit`; if it is slow, raise its time-out.",
                self.label,
                self.timeout_s,
                self._given_up,
                self._waiting,
            )

    def malformed(self, payload: Any) -> InfrastructureError:
        """The error for JSON that is not what the service promises."""
        return InfrastructureError(f"{self.label} sent an answer of an unknown form: {self._safe(str(payload))}")

    def _check(self, response: httpx.Response) -> None:
        status = f"{response.status_code} {response.reason_phrase}".strip()
        if response.is_success:
            return
        if response.status_code in (401, 403):
            what = f"refused the key in {self._key_env}" if self._key else "refused the request"
            raise InfrastructureError(f"{self.label} {what} ({status}).", retry=False)
        transient = response.status_code in TRANSIENT_STATUS or response.status_code >= 500
        raise InfrastructureError(
            f"{self.label} answered {status}: {self._safe(response.text)}".removesuffix(": "),
            retry=transient,
            retry_after_s=parse_retry_after(response.headers.get("Retry-After")),
        )

    async def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            client = httpx.AsyncClient(headers=self._headers, timeout=self.timeout_s, limits=limits)
            keeper = self._keep(loop, client)
            self._clients[loop] = client, keeper
            await anext(keeper)
        return self._clients[loop][0]

    async def _keep(self, loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> AsyncGenerator[None]:
        """Runs to its end when the loop shuts its generators down, as `asyncio.run` and our loop of tools do."""
        try:
            yield
        finally:
            del self._clients[loop]
            await client.aclose()

    def _safe(self, text: str) -> str:
        """Shortened, and without the key."""
        text = " ".join(text.split())
        if self._key:
            text = text.replace(self._key, "***")
        return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def checked_url(url: str) -> str:
    """`url` without a slash at its end.

    Raises:
        `ValueError`: where it is not one, or has a part in which a key could stand.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    if parsed.userinfo or parsed.query:
        raise ValueError("A URL in a recipe has neither a user name nor a query: keys come from the environment.")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not the URL of a service; it begins with http:// or https://.")
    return url.rstrip("/")
