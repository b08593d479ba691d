"""All broken plugins at once harm neither the list, nor the doctor, nor a run that names none of them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from plugin_wheels import Install, Python, Source, plugin
from test_broken_plugins import CASES

pytestmark = pytest.mark.slow

GOOD = """
from posttune import hookimpl

class Plugin:
    \"\"\"1 for everything.\"\"\"

    @hookimpl
    def reward_score(self, samples):
        return [1.0 for _ in samples]
"""


def bad(name: str, body: str = GOOD, **changes: object) -> Source:
    """One more broken reward."""
    return plugin(name, "reward", body, **changes)


MORE = {
    "dies": bad("dies", "import os\nos._exit(7)\n"),
    "hangs": bad("hangs", "import time\ntime.sleep(600)\n"),
    "segfaults": bad("segfaults", "import ctypes\nctypes.string_at(0)\n"),
    "noisy": bad("noisy", "print('noise')\n" + GOOD),
    "recursion": bad("recursion", "def f():\n    return f()\n\nf()\n"),
    "dangling": replace(bad("dangling"), plugins={"reward": {"dangling": "posttune_no_such:Plugin"}}),
    "malformed": replace(bad("malformed"), plugins={"reward": {"malformed": "posttune malformed"}}),
    "otherapi": bad("otherapi", requires=("posttune>=9",)),
    "badrange": bad("badrange", requires=("posttune>>oops",)),
    "engineless": bad("engineless", extras={"engine": ("no-such-engine>=2",)}),
    "twice": bad("twice"),
    "another_twice": replace(bad("twice"), distribution="another-twice"),
    "asbuiltin": replace(bad("asbuiltin"), plugins={"reward": {"gsm8k": "posttune_asbuiltin:Plugin"}}),
    "oddkind": replace(bad("oddkind"), plugins={"rewrad": {"oddkind": "posttune_oddkind:Plugin"}}),
    "forbidden": bad("forbidden"),
}
KILLERS = {"dies", "hangs", "segfaults"}  # only a process of their own can import these
RUN = """
name: toy
output: runs/toy
threads: 1
stages:
  prompts: {kind: convert, source: prompts.jsonl, map: {prompt: question}}
  rl:
    model:
      init: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
             num_attention_heads: 1, num_key_value_heads: 1, head_dim: 32, max_position_embeddings: 64}
      tokenizer: bytes
    data: prompts
    rollout: {name: hf, sampling: {n: 2, max_new_tokens: 4}}
    rewards: [{name: length, options: {target: 2}}]
    batch: {prompts: 2}
    steps: 1
"""


@pytest.fixture
def site(install: Install) -> Path:
    """Every broken plugin of both tables, in one environment."""
    return install(*(case.source for case in CASES), *MORE.values())


def listed(result: subprocess.CompletedProcess[str]) -> dict[tuple[str, str, str], dict[str, str]]:
    """The entries of a list, by kind, name and distribution."""
    assert result.returncode == 0, result.stderr
    return {(each["kind"], each["name"], each["distribution"]): each for each in json.loads(result.stdout)}


def test_there_are_more_than_twenty_ways() -> None:
    assert len(CASES) + len(MORE) >= 20


def test_the_list_and_the_schema(site: Path, python: Python) -> None:
    entries = listed(
        python("-m", "posttune", "plugins", "list", "--json", path=site, POSTTUNE_BLOCK="forbidden")
    )
    for case in CASES:
        assert (case.kind, case.name, case.source.distribution) in entries
    status = {name: entry["status"] for (kind, name, _), entry in entries.items() if kind == "reward"}
    assert status["otherapi"] == "api mismatch"
    assert status["engineless"] == "engine missing"
    assert status["twice"] == "duplicate"
    assert status["forbidden"] == "blocked"
    assert status["gsm8k"] == "duplicate"
    assert status["length"] == "ready"
    assert ("rewrad", "oddkind", "posttune-oddkind") not in entries


def test_the_doctor_names_what_metadata_shows(site: Path, python: Python) -> None:
    result = python("-m", "posttune", "doctor", "--json", path=site, POSTTUNE_BLOCK="forbidden")
    findings = json.loads(result.stdout)["findings"]
    assert "Traceback" not in result.stderr
    about = {(each["code"], word) for each in findings for word in (*each["subject"].split(), each["cause"])}
    for code, word in (
        ("entry-point-dangling", "dangling"),
        ("entry-point-malformed", "malformed"),
        ("api-mismatch", "otherapi"),
        ("engine-missing", "engineless"),
        ("name-twice", "twice"),
        ("name-twice", "gsm8k"),
        ("blocked", "forbidden"),
    ):
        assert any(found == code and word in text for found, text in about), (code, word)


@pytest.mark.slow
def test_a_run_that_names_none_of_them(site: Path, python: Python, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n', encoding="utf-8")
    result = python("-m", "posttune", "run", "run.yaml", "--json", path=site)
    assert result.returncode == 0, result.stderr
    assert [stage["name"] for stage in json.loads(result.stdout)["stages"]] == ["prompts", "rl"]
    text = (tmp_path / "runs/toy/metrics.jsonl").read_text(encoding="utf-8")
    assert "reward/length/mean" in text
    for name in ("noise", "Traceback", "broken premise"):
        assert name not in result.stderr


@pytest.mark.parametrize(
    "name", sorted(MORE.keys() - KILLERS - {"another_twice", "noisy", "oddkind", "badrange"})
)
def test_a_run_that_names_one_says_which(name: str, site: Path, python: Python, tmp_path: Path) -> None:
    wanted = {"asbuiltin": "gsm8k"}.get(name, name)
    (tmp_path / "run.yaml").write_text(
        RUN.replace("{name: length, options: {target: 2}}", f"{{name: {wanted}}}"), encoding="utf-8"
    )
    result = python("-m", "posttune", "config", "check", "run.yaml", path=site, POSTTUNE_BLOCK="forbidden")
    assert result.returncode in (1, 2)
    assert wanted in result.stderr
    assert "next: " in result.stderr
    assert "Traceback" not in result.stderr
