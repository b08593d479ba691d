"""What a server's answers become, without vLLM behind them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from posttune.errors import RunError, UserError
from posttune.types import Request, RolloutContext, Sampling
from posttune_vllm import VllmOptions
from posttune_vllm import _requests as module
from posttune_vllm._requests import Requests
from posttune_vllm.server import Server

PATIENCE_S = 60.0


class Handler(BaseHTTPRequestHandler):
    """Answers by path; a prompt of one token waits until it is let go, any other is refused."""

    waits, let_go, done = threading.Event(), threading.Event(), threading.Event()
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        code = {"/busy": 503, "/closed": 401}.get(self.path, 200)
        self._answer(code, b"<html>a proxy</html>" if self.path == "/html" else b'{"fine": true}')

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["prompt"]) > 1:
            self.waits.wait(PATIENCE_S)
            self._answer(400, b"too long")
            return
        self.waits.set()
        self.let_go.wait(PATIENCE_S)
        self.done.set()
        self._answer(400, b"too late")

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_answers_and_refusals(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    client = Requests(VllmOptions.model_validate({"server": url, "retries": 2}))
    assert client.get("/ready") == {"fine": True}
    with pytest.raises(RunError, match="answered no JSON: <html>a proxy"):
        client.get("/html")
    with pytest.raises(UserError, match="wants an API key"):
        client.get("/closed")
    with pytest.raises(RunError, match=r"did not answer \(3 attempts; status 503"):
        client.get("/busy")
    assert Handler.asked.count("/busy") == 3
    assert Handler.asked.count("/closed") == 1
    client.close()


def test_of_requests_that_fail_the_others_are_not_waited_for(url: str, tmp_path: Path) -> None:
    context = RolloutContext(None, None, "float32", "cpu", 0, 64)
    server = Server(VllmOptions.model_validate({"server": url, "retries": 0}), context, tmp_path)
    asked = [Request("long", (1, 2), 0), Request("waits", (1,), 0)]
    with pytest.raises(RunError, match="too long"):
        server.generate(asked, Sampling(max_new_tokens=2), logprobs=False)
    assert not Handler.done.is_set()
    Handler.let_go.set()
    server.stop()
