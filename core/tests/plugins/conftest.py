"""Fixtures that install small distributions into a folder of their own on the path."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plugin_wheels import Install, Python, Source, build_wheel


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Source], Path]:
    """Wheels, each built once a session."""
    folder = tmp_path_factory.mktemp("wheels")
    built: dict[str, Path] = {}

    def wheel(source: Source) -> Path:
        key = repr(source)
        if key not in built:
            home = folder / str(len(built))
            home.mkdir()
            built[key] = build_wheel(source, home)
        return built[key]

    return wheel


@pytest.fixture
def install(
    wheelhouse: Callable[[Source], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Install]:
    """Unpack wheels into a folder that is first on ``sys.path``, and forget their modules afterwards."""
    site = tmp_path / "site"
    site.mkdir()

    def unpack(*sources: Source) -> Path:
        for source in sources:
            with zipfile.ZipFile(wheelhouse(source)) as wheel:
                wheel.extractall(site)
        monkeypatch.syspath_prepend(site)
        return site

    yield unpack
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(site)):
            del sys.modules[name]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run Python in a subprocess that sees the installed distributions; with the text of its output."""

    def run(*arguments: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "POSTTUNE_BLOCK"}
        paths = [str(path)] if path else []
        paths += [inherited["PYTHONPATH"]] if inherited.get("PYTHONPATH") else []
        variables = {**inherited, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", **environ}
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env=variables,
            cwd=tmp_path,
            timeout=600,
            check=False,
        )

    return run
