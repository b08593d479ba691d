"""The reward `http`: a scorer that runs elsewhere and speaks JSON."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from posttune.config.base import NonNegative, NonNegativeFloat, PositiveFloat, Strict
from posttune.errors import RunError, UserError
from posttune.facade.values import as_number, shown
from posttune.hookspecs import hookimpl
from posttune.types import Needs, Sample, Score

if TYPE_CHECKING:
    import httpx2

AGAIN = (408, 425, 429, 500, 502, 503, 504)
CONNECT_LIMIT = 5.0  # seconds
ANSWER_LIMIT = 1 << 20  # bytes


class HTTPConfig(Strict):
    """Where the scorer is, and how patient to be."""

    url: str = Field(description="Where samples are POSTed to, one a request.")
    timeout_s: PositiveFloat = Field(10.0, description="Seconds for one attempt.")
    retries: NonNegative = Field(3, description="Further attempts after one that failed.")
    backoff_s: NonNegativeFloat = Field(0.5, description="Seconds before the first retry; doubled each time.")
    deadline_s: PositiveFloat = Field(60.0, description="Seconds for a sample, retries included.")
    headers: dict[str, str] = Field(default_factory=dict, description="Sent along; no place for secrets.")
    token_env: str | None = Field(
        None, description="Environment variable whose value is sent as a bearer token."
    )
    columns: list[str] = Field(default_factory=list, description="Data columns that are sent along.")
    check: Literal["connect", "none"] = Field(
        "connect", description="connect: see at the start, before a model loads, that something listens."
    )

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("write http://host:port/path or https://host/path")
        return value


class HTTPReward:
    """POSTs ``{"id", "prompt", "response", "reference", "columns"}`` and reads ``{"score": ...}``.

    The score is a number, an object of numbers (dimensions), or null (unscorable). What may pass (no
    connection, a time-out, status 408, 425, 429 and 5xx) is tried again; what stays wrong is an error,
    and the reward's ``on_error`` says what that does. ``workers`` of the reward caps the requests at a
    time (32). No proxy of the environment is used.
    """

    Config = HTTPConfig

    def __init__(self, config: HTTPConfig) -> None:
        self.config = config
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    @hookimpl
    def reward_needs(self) -> Needs:
        """The columns. Raises UserError where the token is not set or nothing listens at the address."""
        self._headers()
        if self.config.check == "connect":
            self._knock()
        columns = tuple(self.config.columns)
        return Needs(columns=columns, each=True, reads=columns, asynchronous=True)

    @hookimpl
    async def reward_score(self, samples: Sequence[Sample]) -> list[Score]:
        """One request a sample. Raises RunError where the scorer stays down, slow or unreadable."""
        return list(await asyncio.gather(*(self._within_deadline(sample) for sample in samples)))

    async def _within_deadline(self, sample: Sample) -> Score:
        try:
            async with asyncio.timeout(self.config.deadline_s) as clock:
                return await self._score(sample)
        except TimeoutError:
            if not clock.expired():
                raise
            raise self._failed(sample, f"no answer within deadline_s {self.config.deadline_s:g} s") from None

    async def _score(self, sample: Sample) -> Score:
        import httpx2

        problem = ""
        for attempt in range(self.config.retries + 1):
            if attempt:
                pause = self.config.backoff_s * 2 ** (attempt - 1)
                await asyncio.sleep(pause * (0.5 + random.random()))  # so that clients do not come in step
            try:
                answer = await self._client().post(self.config.url, json=self._request(sample))
            except httpx2.TimeoutException:
                problem = f"no answer within timeout_s {self.config.timeout_s:g} s"
            except httpx2.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code not in AGAIN:
                    return self._read(sample, answer)
                problem = f"status {answer.status_code}"
        raise self._failed(sample, f"{problem}, {self.config.retries + 1} times")

    def _request(self, sample: Sample) -> dict[str, Any]:
        columns = {name: sample.columns[name] for name in self.config.columns if name in sample.columns}
        return {
            "id": sample.id,
            "prompt": sample.prompt,
            "response": sample.response,
            "reference": sample.reference,
            "columns": columns,
        }

    def _read(self, sample: Sample, answer: httpx2.Response) -> Score:
        start = answer.text[:80]
        if answer.status_code != 200:
            raise self._failed(sample, f"status {answer.status_code}: {start!r}")
        if len(answer.content) > ANSWER_LIMIT:
            raise self._failed(sample, f"an answer of {len(answer.content):,} bytes")
        try:
            found = answer.json()
        except ValueError:
            raise self._failed(sample, f"an answer that is no JSON: {start!r}") from None
        if not isinstance(found, dict) or "score" not in found:
            raise self._failed(sample, f"an answer without score: {start!r}")
        return self._checked(sample, found["score"])

    def _checked(self, sample: Sample, score: Any) -> Score:
        numbers = score.values() if isinstance(score, dict) and score else [score]
        if score is not None and any(as_number(number) is None for number in numbers):
            raise self._failed(
                sample, f"the score {shown(score)}; a number, an object of numbers or null is one"
            )
        found: Score = score
        return found

    def _failed(self, sample: Sample, what: str) -> RunError:
        fix = "look at the scorer, raise retries or deadline_s, or set on_error: mask on the reward"
        return RunError(f"sample {sample.name}: {what}", who=self._who, fix=fix)

    @property
    def _who(self) -> str:
        return f"reward 'http' at {self.config.url}"

    def _client(self) -> httpx2.AsyncClient:
        """One client a loop, so that connections are used again."""
        import httpx2

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx2.AsyncClient(
                timeout=self.config.timeout_s,
                headers=self._headers(),
                limits=httpx2.Limits(max_connections=None),
                trust_env=False,
            )
        return self._clients[loop]

    def _headers(self) -> dict[str, str]:
        name = self.config.token_env
        if name is None:
            return self.config.headers
        if not os.environ.get(name):
            what = f"the environment variable {name}, which should hold its token, is not set"
            raise UserError(what, who=self._who, fix=f"set {name}, or remove options.token_env")
        return {**self.config.headers, "Authorization": f"Bearer {os.environ[name]}"}

    def _knock(self) -> None:
        parts = urlsplit(self.config.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), CONNECT_LIMIT).close()
        except OSError as error:
            what = f"nothing answers at {parts.hostname}:{port}: {error}"
            fix = "start the scorer, correct options.url, or set options.check: none if it starts later"
            raise UserError(what, who=self._who, fix=fix) from error
