"""The reward `http` against a server on this machine that answers well, badly, slowly or not at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from posttune.config.models import RewardRef
from posttune.errors import PluginOptionsError, RunError, UserError
from posttune.facade import Rewards, build_rewards
from posttune.types import Sample

pytestmark = pytest.mark.slow


class Scorer(BaseHTTPRequestHandler):
    """Does what the response asks for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen = self.server.seen  # type: ignore[attr-defined]
        with self.server.lock:  # type: ignore[attr-defined]
            seen.append((request, dict(self.headers)))
            self.server.busy += 1  # type: ignore[attr-defined]
            self.server.most = max(self.server.most, self.server.busy)  # type: ignore[attr-defined]
        word, _, rest = request["response"].partition(":")
        tries = sum(each["response"] == request["response"] for each, _ in seen)
        if word == "slow":
            time.sleep(float(rest))
        with self.server.lock:  # type: ignore[attr-defined]
            self.server.busy -= 1  # type: ignore[attr-defined]
        if word == "flaky" and tries <= int(rest):
            return self._answer(503, "try later")
        if word == "status":
            return self._answer(int(rest), "no such thing")
        if word == "drop":
            self.close_connection = True
            return None
        return self._answer(200, rest if word == "raw" else json.dumps({"score": len(request["response"])}))

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


class Quiet(ThreadingHTTPServer):
    """A client that gives up is no news."""

    def handle_error(self, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    scorer = Quiet(("127.0.0.1", 0), Scorer)
    scorer.seen, scorer.busy, scorer.most, scorer.lock = [], 0, 0, threading.Lock()
    scorer.daemon_threads = True
    scorer.url = f"http://127.0.0.1:{scorer.server_port}/score"
    threading.Thread(target=scorer.serve_forever, daemon=True).start()
    yield scorer
    scorer.shutdown()
    scorer.server_close()


def made(url: str, execution: dict[str, Any] | None = None, **options: Any) -> Rewards:
    options = {"url": url, "backoff_s": 0.01, **options}
    return build_rewards([RewardRef(name="http", label="judge", options=options, **(execution or {}))])


def batch(*responses: str) -> list[Sample]:
    return [Sample(f"s{i}", 0, "p", each, "r", {"level": i, "odd": 1}) for i, each in enumerate(responses)]


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_scores_come_back_in_order(server, executor):
    rewards = made(server.url, {"executor": executor}, columns=["level"])
    raw = ('raw:{"score": null}', 'raw:{"score": {"a": 1, "b": 0.5}}')
    found = rewards.score(batch("abc", *raw, "x"))
    assert found == {"judge": [3.0, None, {"a": 1.0, "b": 0.5}, 1.0]}
    requests = {each["id"]: each for each, _ in server.seen}
    assert requests["s0"] == {
        "id": "s0", "prompt": "p", "response": "abc", "reference": "r", "columns": {"level": 0}
    }  # fmt: skip


def test_what_may_pass_is_tried_again(server):
    assert made(server.url, retries=2).score(batch("flaky:2")) == {"judge": [7.0]}
    assert len(server.seen) == 3


def test_workers_cap_the_requests_at_a_time(server):
    rewards = made(server.url, {"workers": 3})
    assert rewards.score(batch(*["slow:0.1"] * 12)) == {"judge": [8.0] * 12}
    assert server.most == 3


@pytest.mark.parametrize(("response", "words"), [
    ("flaky:9", "sample s0: status 503, 2 times"),
    ("status:404", "status 404: 'no such thing'"),
    ("status:302", "status 302"),
    ("raw:<html>", "an answer that is no JSON: '<html>'"),
    ("raw:[1]", "an answer without score: '[1]'"),
    ("raw:{\"scor\": 1}", "an answer without score"),
    ("raw:{\"score\": \"good\"}", "the score str 'good'"),
    ("raw:{\"score\": true}", "the score bool True"),
    ("raw:{\"score\": {}}", "the score dict {}"),
    ("raw:{\"score\": Infinity}", "the score float inf"),
    ("drop", "2 times"),
    ("slow:5", "no answer within timeout_s 0.2 s, 2 times"),
])  # fmt: skip
def test_what_stays_wrong_names_the_reward_and_the_way_out(server, response, words):
    rewards = made(server.url, retries=1, timeout_s=0.2)
    with pytest.raises(RunError) as caught:
        rewards.score(batch(response))
    message = str(caught.value)
    assert message.startswith(f"reward 'http' at {server.url}: ")
    assert words in message
    assert "on_error: mask" in message
    masked = made(server.url, {"on_error": "mask"}, retries=1, timeout_s=0.2)
    assert masked.score(batch(response, "ok")) == {"judge": [None, 2.0]}
    assert masked.stats["judge"].errors == 1


def test_the_deadline_holds_over_all_attempts(server):
    rewards = made(server.url, retries=1000, timeout_s=5.0, deadline_s=0.3)
    with pytest.raises(RunError, match=r"no answer within deadline_s 0\.3 s"):
        rewards.score(batch("flaky:1000"))


def test_a_scorer_that_is_down_is_known_before_any_model_loads():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=r"reward 'http' at http://127.*: nothing answers at 127\.0\.0\.1"):
        made(url)
    with pytest.raises(RunError, match="ConnectError"):
        made(url, check="none", retries=1).score(batch("x"))


def test_a_token_comes_from_the_environment(server, monkeypatch):
    with pytest.raises(UserError, match="variable JUDGE_TOKEN, which should hold its token, is not set"):
        made(server.url, token_env="JUDGE_TOKEN")
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    made(server.url, token_env="JUDGE_TOKEN", headers={"X-Run": "7"}).score(batch("x"))
    headers = {name.lower(): value for name, value in server.seen[0][1].items()}
    assert (headers["authorization"], headers["x-run"]) == ("Bearer abc", "7")


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x/y", "http://", "score"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(PluginOptionsError, match="write http://host:port/path"):
        made(url)
