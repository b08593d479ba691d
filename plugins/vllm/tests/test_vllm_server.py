"""The rollout suite against a real server on a CPU, launched as the README says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs the engine: make test-engines")

from posttune.config.models import PluginRef
from posttune.errors import PosttuneError, RunError, UserError
from posttune.facade import RolloutEngine, build_rollout
from posttune.testing._rollout_bench import CONTEXT, Bench, requests
from posttune.testing.rollout_suite import RolloutSuite
from posttune.testing.tiny import tiny_model
from posttune.types import RolloutContext, Sampling

pytestmark = pytest.mark.engine

EXTENSION = ("--worker-extension-cls", "posttune_vllm.worker.WorkerExtension")
MODE = ("--logprobs-mode", "processed_logprobs")
START_S = 540.0


class Launched:
    """A server on a free port of this machine, in a session of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder.parent / f"server-{port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "8"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), *arguments]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **settings}, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.5)
        raise RuntimeError(self.log.read_text("utf-8", "replace")[-3000:])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class TestServer(RolloutSuite):
    backend = "vllm"
    options: ClassVar[Mapping[str, Any]] = {"server": "http://127.0.0.1:9"}  # until one is launched
    launched: ClassVar[Launched | None] = None

    @classmethod
    def serve(cls, folder: Path) -> None:
        """One server at a time."""
        if cls.launched is not None:
            cls.launched.kill()
        cls.launched = Launched(folder, *MODE, *EXTENSION)
        cls.options = {"server": cls.launched.url, "retries": 2}
        cls.launched.wait()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        if cls.launched is not None:
            cls.launched.kill()
            cls.launched = None

    @pytest.fixture
    def bench(self, tmp_path_factory: pytest.TempPathFactory) -> Bench:
        cls = type(self)
        if cls._bench is None:
            made = Bench(self, tmp_path_factory.mktemp("rollout") / "model")
            cls.serve(made.folder)
            cls._bench = made
        cls._bench.reset()
        return cls._bench

    @contextlib.contextmanager
    def alone(self, bench: Bench, folder: str = "model", *, tie: bool = False) -> Iterator[Bench]:
        with super().alone(bench, folder, tie=tie) as mine:
            self.serve(mine.folder)
            yield mine

    def test_tied_embeddings(self, bench: Bench) -> None:
        try:
            super().test_tied_embeddings(bench)
        finally:
            self.serve(bench.folder)

    def test_weights_come_by_way_of_a_shared_folder(self, bench: Bench, tmp_path: Path) -> None:
        bench.close()
        assert self.launched is not None
        reference = PluginRef(
            name="vllm", options={"server": self.launched.url, "shared_folder": str(tmp_path), "bucket_mb": 1}
        )
        with build_rollout(reference) as engine:
            engine.start(bench.context())
            engine.load_weights(iter(bench.original.items()), 7)
            assert engine.info.server
            (answer,) = engine.generate(requests()[:1], Sampling(max_new_tokens=3))
            assert answer.weight_version == 7
            assert list(tmp_path.rglob("*.safetensors")) == []
        assert list(tmp_path.iterdir()) == []

    def test_zz_a_killed_server_is_told_at_once(self, bench: Bench) -> None:
        bench.answer(requests()[:1], Sampling(max_new_tokens=2))
        assert self.launched is not None
        self.launched.kill()
        began = time.monotonic()
        with pytest.raises(RunError, match="did not answer"):
            bench.answer(requests()[:1], Sampling(max_new_tokens=2))
        assert time.monotonic() - began < 30
        bench.forget()


def starting(url: str, folder: Path, **options: Any) -> RolloutEngine:
    engine = build_rollout(PluginRef(name="vllm", options={"server": url, "retries": 0, **options}))
    engine.start(RolloutContext(folder, None, "float32", "cpu", 0, 64))
    return engine


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(PosttuneError, match="did not answer"):
        starting("http://127.0.0.1:9", tiny_model(tmp_path / "model"))


def test_a_server_launched_otherwise_is_refused_with_the_command(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    server = Launched(folder, *EXTENSION)
    try:
        server.wait()
        with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
            starting(server.url, folder)
        starting(server.url, folder, logprobs="never").stop()
        with pytest.raises(UserError, match="not set"):
            starting(server.url, folder, token_env="POSTTUNE_NO_SUCH_TOKEN")
    finally:
        server.kill()
