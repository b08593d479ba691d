"""What starts fast must import nothing heavy. Each case is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HEAVY = (
    "accelerate", "bert_score", "datasets", "gguf", "peft", "pyarrow", "sglang", "sympy", "torch",
    "transformers", "vllm",
)  # fmt: skip

PROLOGUE = f"""
import json, sys
HEAVY = {HEAVY!r}
def heavy():
    return sorted(name for name in HEAVY if name in sys.modules)
def report(document):
    sys.__stderr__.write("REPORT " + json.dumps(document) + "\\n")
"""


def reported(code: str, tmp_path: Path) -> Any:
    """What a process reports that runs the code."""
    environ = {name: value for name, value in os.environ.items() if name != "POSTTUNE_BLOCK"}
    result = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code],
        capture_output=True,
        text=True,
        env=environ,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("REPORT ")]
    assert lines, result.stderr
    return json.loads(lines[-1].removeprefix("REPORT "))


@pytest.mark.parametrize(
    "statement",
    [
        "import posttune; posttune.__version__, posttune.API, posttune.hookimpl",
        "import posttune; posttune.BaseRewardFunction",
        "import posttune; posttune.HFModel('some/model', is_critic=True)",
        "import posttune.config.trainer_options, posttune.config.trainer_problems, posttune.reward.objects",
        "import posttune.catalog",
        "import posttune.pipeline",
        "import posttune.facade",
        "import posttune.types, posttune.errors, posttune.testing",
        "import posttune.config.models",
    ],
)
def test_these_imports_are_light(statement: str, tmp_path: Path) -> None:
    assert reported(f"{statement}\nreport(heavy())", tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plugins", "list"], ["plugins", "list", "--json"], ["version"], ["config", "schema"]],
    ids=" ".join,
)
def test_these_commands_are_light(arguments: list[str], tmp_path: Path) -> None:
    code = f"from posttune.cli.main import main\ncode = main({arguments!r})\nreport([code, heavy()])"
    assert reported(code, tmp_path) == [0, []]


def test_a_model_without_adapters_needs_no_peft(tmp_path: Path) -> None:
    """It would take as long again as transformers to import."""
    code = """
import posttune.checkpoint.sources, posttune.distributed.sharding, posttune.trainer.rl, posttune.trainer.sft
from pathlib import Path
from posttune.config.models import ModelConfig
from posttune.models.load import load_model
from posttune.models.params import named_hf_tensors
from posttune.testing.tiny import tiny_model
folder = tiny_model(Path("model"))
loaded = load_model(ModelConfig(path=str(folder)), folder, seed=0)
report(["peft" in heavy(), loaded.lora, len(list(named_hf_tensors(loaded.model))) > 0])
"""
    assert reported(code, tmp_path) == [False, False, True]


def test_the_help_of_every_command_is_light(tmp_path: Path) -> None:
    code = """
from posttune.cli.main import COMMANDS, main
found = {}
for name in COMMANDS:
    code = main([name, "--help"])
    found[name] = [code, heavy()]
report(found)
"""
    found = reported(code, tmp_path)
    assert len(found) >= 10
    assert {name: state for name, state in found.items() if state != [0, []]} == {}


def test_every_installed_plugin_loads_without_a_heavy_library(tmp_path: Path) -> None:
    code = """
from posttune.catalog import Catalog
from posttune.pipeline import load_plugin
catalog, seen, loaded, broken = Catalog(), set(), {}, {}
for entry in catalog.entries():
    if entry.status != "ready":
        continue
    try:
        load_plugin(entry.kind, entry.name, catalog)
    except Exception as error:
        broken[f"{entry.kind} {entry.name}"] = str(error)
    loaded[f"{entry.kind} {entry.name}"] = sorted(set(heavy()) - seen)
    seen |= set(heavy())
report([loaded, broken])
"""
    loaded, broken = reported(code, tmp_path)
    assert broken == {}
    assert len(loaded) > 25
    assert {name: heavy for name, heavy in loaded.items() if heavy} == {}


def test_the_check_itself_sees_a_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "sympy.py").write_text("", encoding="utf-8")
    assert reported("import sympy\nreport(heavy())", tmp_path) == ["sympy"]
