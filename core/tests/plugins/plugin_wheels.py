"""Small real distributions: wheels written once a session, unpacked into one folder per test."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Install = Callable[..., Path]
Python = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Source:
    """What a distribution holds. ``plugins`` maps kind to name to "module:Class"."""

    distribution: str
    modules: Mapping[str, str]
    plugins: Mapping[str, Mapping[str, str]]
    version: str = "1.2.3"
    requires: tuple[str, ...] = ("posttune>=0.1,<0.2",)
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """As the file name of its wheel begins."""
        return f"{self.distribution.replace('-', '_')}-{self.version}"


def plugin(name: str, kind: str, body: str, **changes: object) -> Source:
    """A distribution ``posttune-<name>`` with one plugin ``name``: the class Plugin of one module."""
    module = f"posttune_{name}"
    return Source(
        distribution=f"posttune-{name.replace('_', '-')}",
        modules={module: textwrap.dedent(body)},
        plugins={kind: {name: f"{module}:Plugin"}},
        **changes,  # type: ignore[arg-type]
    )


def build_wheel(source: Source, folder: Path) -> Path:
    """Write the wheel of a distribution, valid for pip."""
    path = folder / f"{source.stem}-py3-none-any.whl"
    contents = {f"{module}.py": text for module, text in source.modules.items()}
    info = f"{source.stem}.dist-info"
    contents[f"{info}/METADATA"] = _metadata(source)
    contents[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: posttune-tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    contents[f"{info}/entry_points.txt"] = _entry_points(source)
    record = "".join(f"{name},{_digest(text)},{len(text.encode())}\n" for name, text in contents.items())
    contents[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in contents.items():
            wheel.writestr(name, text)
    return path


def _metadata(source: Source) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {source.distribution}", f"Version: {source.version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in source.requires]
    for extra, requirements in source.extras.items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {requirement}; extra == "{extra}"' for requirement in requirements]
    return "\n".join(lines) + "\n"


def _entry_points(source: Source) -> str:
    lines = []
    for kind, names in source.plugins.items():
        lines.append(f"[posttune.{kind}]")
        lines += [f"{name} = {target}" for name, target in names.items()]
    return "\n".join(lines) + "\n"


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return "sha256=" + digest.decode().rstrip("=")
