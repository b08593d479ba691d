"""HTTP to a vLLM server: retries for what passes by itself, and errors that say what to do."""

from __future__ import annotations

import os
import time
from typing import Any

import httpx2
from posttune.errors import RunError, UserError

from posttune_vllm.installed import WHO
from posttune_vllm.options import VllmOptions

AGAIN = (408, 425, 429, 502, 503, 504)
CONNECT_S, FIRST_PAUSE_S = 5.0, 0.5
SHOWN = 300  # characters of what a server answered


class Requests:
    """JSON in and out of one server. May be used by several threads."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        headers = {}
        if options.token_env is not None:
            token = os.environ.get(options.token_env)
            if not token:
                what = f"the environment variable {options.token_env} is not set"
                raise UserError(what, who="rollout.options.token_env", fix="set it to the server's API key")
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx2.Client(
            base_url=str(options.server),
            headers=headers,
            timeout=httpx2.Timeout(options.request_timeout_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
        )

    def get(self, path: str) -> Any:
        """What a route answers."""
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None) -> Any:
        """What a route answers to a body."""
        return self._send("POST", path, body)

    def close(self) -> None:
        """End every connection."""
        self._client.close()

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        failure = ""
        for attempt in range(self._options.retries + 1):
            if attempt:
                time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                response = self._client.request(method, path, json=body)
            except httpx2.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status_code not in AGAIN:
                return self._read(path, response)
            failure = f"status {response.status_code}: {response.text[:SHOWN]}"
        tried = f"{self._options.retries + 1} attempts"
        what = f"{self._options.server}{path} did not answer ({tried}; {failure})"
        raise RunError(
            what, who=WHO, fix="see whether the server's process still runs, and what it wrote last"
        )

    def _read(self, path: str, response: httpx2.Response) -> Any:
        if response.status_code == 401:
            fix = "name the environment variable of its API key in rollout.options.token_env"
            raise UserError(f"{self._options.server} wants an API key", who=WHO, fix=fix)
        if response.status_code >= 400:
            what = f"{self._options.server}{path} answered {response.status_code}: {response.text[:SHOWN]}"
            raise RunError(what, who=WHO, fix="see what the server wrote")
        try:
            return response.json() if response.content else {}
        except ValueError as error:
            what = f"{self._options.server}{path} answered no JSON: {response.text[:SHOWN]}"
            raise RunError(what, who=WHO, fix="see whether vLLM is what listens there") from error
