"""A plugin installed by pip into a fresh environment is found at once, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_wheels import Source, plugin

REWARD = """
from posttune import hookimpl

class Plugin:
    @hookimpl
    def reward_score(self, samples):
        return [float(len(sample.response)) for sample in samples]
"""

SCORE = """
from posttune.config.models import PluginRef
from posttune.facade import build_rewards
from posttune.types import Sample
print(build_rewards([PluginRef(name="piped")]).score([Sample("s", 0, "p", "four")]))
"""


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "POSTTUNE"))
    }
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, env=environ, timeout=300, check=False
    )


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The Python of a new environment that sees this one's packages, so that nothing is downloaded."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    (site,) = home.glob("lib/python*/site-packages")
    ours = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("core/src"))]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in ours)
    (site / "base.pth").write_text(lines, encoding="utf-8")
    return home / "bin" / "python"


@pytest.mark.slow
@pytest.mark.install
def test_a_plugin_is_seen_from_its_install_to_its_removal(
    fresh: Path, wheelhouse: Callable[[Source], Path]
) -> None:
    def names() -> list[str]:
        result = run(fresh, "-m", "posttune", "plugins", "list", "--kind", "reward", "--json")
        assert result.returncode == 0, result.stderr
        return [entry["name"] for entry in json.loads(result.stdout)]

    wheel = wheelhouse(plugin("piped", "reward", REWARD))
    assert "piped" not in names()
    installed = run(fresh, "-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    assert installed.returncode == 0, installed.stderr
    assert "piped" in names()
    assert run(fresh, "-c", SCORE).stdout.strip() == "{'piped': [4.0]}"
    removed = run(fresh, "-m", "pip", "uninstall", "--yes", "posttune-piped")
    assert removed.returncode == 0, removed.stderr
    assert "piped" not in names()
    unknown = run(fresh, "-m", "posttune", "plugins", "show", "reward", "piped")
    assert unknown.returncode == 2
    assert "nothing installed bears this name" in unknown.stderr
