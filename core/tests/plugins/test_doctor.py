"""The doctor: every ill that can be planted is named by its code, and none of them stops it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from plugin_wheels import Install, Python, Source, plugin
from posttune.cli.main import main
from posttune.doctor import machine
from posttune.doctor.findings import CODES
from posttune.doctor.inventory import Inventory
from posttune.doctor.plugins import owners
from posttune.errors import UserError

pytestmark = pytest.mark.slow

GOOD = """
from posttune import hookimpl

class Plugin:
    @hookimpl
    def reward_score(self, samples):
        return [1.0 for _ in samples]
"""
FINDING = ["code", "severity", "subject", "cause", "fix"]


def module(name: str, text: str) -> Source:
    """A distribution that only holds a module, as an engine would."""
    return Source(distribution=name, modules={name.replace("-", "_"): text}, plugins={}, requires=())


@dataclass(frozen=True)
class Ill:
    """Distributions, the code that the doctor must give, and words of its cause."""

    name: str
    sources: tuple[Source, ...]
    code: str
    severity: str
    cause: str
    arguments: tuple[str, ...] = ()
    blocked: str = ""


def reward(name: str, text: str = GOOD, **changes: object) -> Source:
    return plugin(name, "reward", text, **changes)


def engined(name: str, *requirements: str) -> Source:
    return reward(name, extras={"engine": requirements})


ENGINE_A = replace(module("engine-a", ""), requires=("shared-kernels==1.9",))
ENGINE_B = replace(module("engine-b", ""), requires=("shared-kernels>=1.10",))

ILLS = [
    Ill("missing", (reward("lacks", requires=("posttune>=0.1", "no-such-thing>=2")),),
        "requirement-missing", "error", "no-such-thing>=2 is not installed"),
    Ill("conflict", (reward("old", requires=("posttune>=0.1", "pluggy>=99")),),
        "requirement-conflict", "error", "it requires pluggy>=99"),
    Ill("damaged", (reward("odd", requires=("posttune>=0.1", "what is this")),),
        "requirement-damaged", "warning", "'what is this'"),
    Ill("engine", (engined("engineless", "no-such-engine>=2"),),
        "engine-missing", "warning", "no-such-engine>=2 is not installed"),
    Ill("engine named", (engined("engineless", "no-such-engine>=2"),),
        "engine-missing", "error", "no-such-engine>=2 is not installed", ("engineless",)),
    Ill("engine old", (engined("engineold", "pluggy>=99"),),
        "engine-conflict", "warning", "pluggy>=99"),
    Ill("deeper", (engined("deep", "engine-a"), ENGINE_A),
        "engine-missing", "warning", "shared-kernels==1.9 is not installed, for engine-a"),
    Ill("pins", (engined("left", "engine-a"), engined("right", "engine-b"), ENGINE_A, ENGINE_B),
        "pins-disjoint", "warning", "posttune-left requires shared-kernels==1.9, and posttune-right"),
    Ill("api", (reward("otherapi", requires=("posttune>=9",)),),
        "api-mismatch", "error", "it requires posttune>=9"),
    Ill("dangling", (replace(reward("gone"), plugins={"reward": {"gone": "posttune_nowhere:Plugin"}}),),
        "entry-point-dangling", "error", "posttune_nowhere:Plugin"),
    Ill("dangling below", (replace(reward("gone"), plugins={"reward": {"gone": "json.nowhere:Plugin"}}),),
        "entry-point-dangling", "error", "json.nowhere:Plugin"),
    Ill("malformed", (replace(reward("form"), plugins={"reward": {"form": "posttune_form"}}),),
        "entry-point-malformed", "error", "not module:attribute"),
    Ill("twice", (reward("twice"), replace(reward("twice"), distribution="another-twice")),
        "name-twice", "error", "both offer this name"),
    Ill("distribution twice", (reward("old"), replace(reward("old"), version="2.0")),
        "plugin", "info", "offers reward: old"),
    Ill("blocked", (reward("forbidden"),),
        "blocked", "info", "POSTTUNE_BLOCK forbids it", (), "forbidden"),
    Ill("import", (reward("broken", "import no_such_engine\n"),),
        "import-failed", "error", "no_such_engine", ("broken", "--import")),
    Ill("exits", (reward("exits", "import sys\nsys.exit(4)\n"),),
        "import-failed", "error", "called sys.exit(4)", ("exits", "--import")),
    Ill("crash", (reward("crashes", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"),),
        "import-crashed", "error", "SIGSEGV", ("crashes", "--import")),
    Ill("hard exit", (reward("hard", "import os\nos._exit(7)\n"),),
        "import-crashed", "error", "status 7", ("hard", "--import")),
    Ill("hang", (reward("hangs", "import time\ntime.sleep(600)\n"),),
        "import-timeout", "error", "within 4 s", ("hangs", "--import", "--deadline", "4")),
    Ill("heavy", (reward("heavy", "import sympy\n" + GOOD),),
        "import-heavy", "warning", "sympy", ("heavy", "--import")),
    Ill("engine crash", (engined("motor", "engine-c"), module("engine-c", "import os\nos.abort()\n")),
        "import-crashed", "error", "SIGABRT", ("motor", "--import")),
]  # fmt: skip


class Examine:
    """Runs the command in this process; what it imports is imported in others."""

    def __init__(self, patch: pytest.MonkeyPatch, told: pytest.CaptureFixture[str]) -> None:
        self.patch, self.told = patch, told

    def __call__(self, site: Path, *arguments: str, blocked: str = "") -> tuple[int, list[dict[str, str]]]:
        self.patch.setenv("PYTHONPATH", str(site))
        self.patch.setenv("POSTTUNE_BLOCK", blocked)
        code = main(["doctor", "--json", *arguments])
        document = json.loads(self.told.readouterr().out)
        assert list(document) == ["ok", "findings"]
        findings: list[dict[str, str]] = document["findings"]
        assert all(list(finding) == FINDING for finding in findings)
        assert all(finding["cause"] and finding["fix"] for finding in findings)
        assert {finding["code"] for finding in findings} <= CODES.keys()
        assert document["ok"] == all(finding["severity"] != "error" for finding in findings)
        return code, findings


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examine:
    """``posttune doctor --json`` with distributions that were installed for the test."""
    return Examine(monkeypatch, capsys)


@pytest.mark.parametrize("ill", ILLS, ids=lambda ill: ill.name)
def test_every_ill_is_named(ill: Ill, install: Install, examine: Examine) -> None:
    site = install(*ill.sources)
    code, findings = examine(site, *ill.arguments, blocked=ill.blocked)
    found = [each for each in findings if each["code"] == ill.code and ill.cause in each["cause"]]
    assert found, [each for each in findings if each["severity"] != "info"]
    assert found[0]["severity"] == ill.severity
    assert code == (0 if all(each["severity"] != "error" for each in findings) else 1)


def test_a_crash_does_not_hide_the_others(install: Install, examine: Examine) -> None:
    dying = "import os\nos.abort()\n"
    both = Source(
        "posttune-both",
        {"posttune_die": dying, "posttune_live": GOOD},
        {"reward": {"a_dies": "posttune_die:Plugin", "b_lives": "posttune_live:Plugin"}},
    )
    _, findings = examine(install(both), "posttune-both", "--import")
    assert [each["subject"] for each in findings if each["severity"] == "error"] == ["reward a_dies"]
    assert ["reward b_lives" in each["cause"] for each in findings if each["code"] == "imported"] == [True]


def test_a_damaged_neighbour_is_passed_over(install: Install, examine: Examine) -> None:
    site = install(reward("fine"))
    folder = site / "bad-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(b"\xff\xfe\x00")
    (folder / "entry_points.txt").write_text("not = an ini [")
    code, findings = examine(site)
    assert code == 0
    assert any(each["subject"] == "posttune-fine" for each in findings)
    assert any(each["code"] == "metadata-damaged" for each in findings)


def test_the_same_distribution_in_two_places(
    install: Install, examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install(reward("double"))
    second = tmp_path / "second"
    subprocess.run(["cp", "-r", str(site), str(second)], check=True)
    monkeypatch.syspath_prepend(second)
    _, findings = examine(site, "double")
    assert any(each["code"] == "distribution-twice" for each in findings)


def test_a_healthy_installation_has_no_error(examine: Examine, tmp_path: Path) -> None:
    code, findings = examine(tmp_path, "gsm8k")
    assert code == 0
    assert {"python", "core", "torch", "plugin"} <= {each["code"] for each in findings}


def test_an_unknown_name_is_a_mistake(python: Python, tmp_path: Path) -> None:
    done = python("-m", "posttune", "doctor", "gms8k", path=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'gsm8k'?" in done.stderr


def test_in_words_a_fault_has_its_code_and_command(install: Install, python: Python) -> None:
    done = python("-m", "posttune", "doctor", path=install(engined("engineless", "no-such-engine")))
    assert done.returncode == 0
    assert 'engine-missing; next: pip install "posttune-engineless[engine]"' in done.stdout
    warned = re.findall(r"^! ", done.stdout, re.MULTILINE)  # engines of our own may be missing too
    assert f"0 errors, {len(warned)} warnings" in done.stdout


def test_core_comes_first_and_names_are_canonical(install: Install) -> None:
    install(replace(reward("shape"), distribution="Posttune_Shape"))
    found = owners(Inventory())
    assert found[0] == "posttune"
    assert "posttune-shape" in found


class TestMachine:
    def test_the_cuda_of_a_build_is_read_not_imported(self, tmp_path: Path) -> None:
        file = tmp_path / "version.py"
        file.write_text("__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n")
        assert machine.cuda_of(file) == "12.8"
        file.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
        assert machine.cuda_of(file) == ""
        assert machine.cuda_of(tmp_path / "absent.py") == ""

    def test_an_old_driver(self) -> None:
        found = list(machine._driver("Tesla, driver 470.57.02, 16384 MiB", "12.8"))
        assert [each.code for each in found] == ["driver-old"]
        assert not list(machine._driver("H200, driver 580.95.05, 143771 MiB", "13.0"))

    def test_a_gpu_that_torch_cannot_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.95.05, 143771 MiB'\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(machine, "cuda_of", lambda _: "")
        codes = [each.code for each in machine.machine_findings(Inventory())]
        assert "gpu" in codes
        assert "torch-without-cuda" in codes

    def test_little_space(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(machine, "LITTLE_SPACE", 10**18)
        assert machine._disk(tmp_path).code == "disk-low"

    def test_no_torch(self) -> None:
        class Empty(Inventory):
            def get(self, name: str) -> None:
                return None

        assert [each.code for each in machine._torch_and_gpu(Empty())] == ["torch-missing"]


def test_every_code_is_used_and_every_use_has_a_code() -> None:
    folder = Path(machine.__file__).parent
    used: set[str] = set()
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        used |= set(re.findall(r'Finding\(\s*"([a-z-]+)"', text)) | set(
            re.findall(r'"(engine-\w+|requirement-\w+)"', text)
        )
    assert used == CODES.keys()


def test_a_name_that_nobody_bears() -> None:
    from posttune.catalog import Catalog
    from posttune.doctor.plugins import chosen

    with pytest.raises(UserError, match="did you mean"):
        chosen(["gms8k"], Inventory(), Catalog())
