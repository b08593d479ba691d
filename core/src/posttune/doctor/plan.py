"""Whether plugins can share an environment, asked of a resolver before anything is installed.

uv reads the metadata of the packages and installs nothing. Projects that lie on this machine are
given to it by path: those that are installed from a folder, and those beside posttune's own source.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import posttune
from posttune.doctor.findings import Finding
from posttune.doctor.inventory import Inventory
from posttune.errors import UserError
from posttune.metadata import CORE, name_of

DEADLINE = 180.0
SHOWN = ("torch", "transformers", "vllm", "sglang")


def plan_findings(texts: Sequence[str], inventory: Inventory, deadline: float) -> list[Finding]:
    """One finding: possible, impossible and why, or unknown and why. Raises UserError."""
    places = local_projects(inventory)
    lines = [requirement_line(text, places) for text in texts]
    if CORE in places and not any(line.startswith(f"{CORE} ") for line in lines):
        lines.append(f"{CORE} @ {places[CORE].as_uri()}")
    subject = " and ".join(texts)
    program = find_uv()
    if program is None:
        cause = "the resolver uv is not installed"
        return [Finding("plan-unknown", "error", subject, cause, 'pip install "posttune[plan]"')]
    return [_ask(program, lines, subject, deadline)]


def find_uv() -> str | None:
    """uv of this environment, or of the path."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else shutil.which("uv")


def requirement_line(text: str, places: dict[str, Path]) -> str:
    """A requirement as the resolver takes it: a folder, or a name whose project lies here, by path."""
    folder, bracket, extras = text.partition("[")
    if folder.startswith((".", "/", "~")) or os.sep in folder:
        path = Path(folder).expanduser().resolve()
        name = _project_name(path)
        if not name:
            raise UserError(
                f"no pyproject.toml with a name in {path}", who=text, fix="name a project's folder"
            )
        return f"{name}{bracket}{extras} @ {path.as_uri()}"
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        what = f"is no requirement: {str(error).partition(chr(10))[0]}"
        raise UserError(what, who=text, fix='write it like "posttune-vllm[engine]"') from error
    place = places.get(canonicalize_name(requirement.name))
    if place is None or requirement.url:
        return text
    asked = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{asked} @ {place.as_uri()}"


def local_projects(inventory: Inventory) -> dict[str, Path]:
    """The folders of projects on this machine, by name of the distribution."""
    found: dict[str, Path] = {}
    tree = Path(posttune.__file__).parents[3]  # of an editable install: the repository
    for file in [*tree.glob("core/pyproject.toml"), *tree.glob("plugins/*/pyproject.toml")]:
        name = _project_name(file.parent)
        if name:
            found[canonicalize_name(name)] = file.parent
    for distribution in inventory:
        try:
            url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
        except (ValueError, AttributeError, OSError):
            continue
        place = Path(unquote(urlparse(url).path)) if url.startswith("file://") else None
        if place is not None and (place / "pyproject.toml").is_file():
            found[canonicalize_name(name_of(distribution))] = place
    return found


def _project_name(folder: Path) -> str:
    try:
        data = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return ""
    return str(data.get("project", {}).get("name", ""))


def _ask(program: str, lines: Sequence[str], subject: str, deadline: float) -> Finding:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [program, "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    command += ["--python-version", python, "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, timeout=deadline, check=False
        )
    except subprocess.TimeoutExpired:
        cause = f"uv did not answer within {deadline:g} s"
        return Finding("plan-unknown", "error", subject, cause, "try again with a longer --deadline")
    if done.returncode == 0:
        return _possible(done.stdout, subject)
    return _refused(done.stderr, subject)


def _possible(output: str, subject: str) -> Finding:
    pins = [line.strip() for line in output.splitlines() if "==" in line]
    shown = [pin for pin in pins if pin.partition("==")[0] in SHOWN]
    cause = f"{len(pins)} packages fit together, among them {', '.join(shown) or 'no engine'}"
    return Finding("plan-possible", "info", subject, cause, f"pip install {_quoted(subject)}")


def _refused(message: str, subject: str) -> Finding:
    text = " ".join(message.split())
    text = re.sub(r"^error: ", "", text)
    text = re.sub(r"\S*file://\S*/(\S+)", r"\1", text)
    if "No solution found" not in text and "unsatisfiable" not in text:
        fix = "check the network and the names; UV_INDEX_URL names another index"
        return Finding("plan-unknown", "error", subject, text or "uv failed without a word", fix)
    text = re.sub(r"^No solution found when resolving dependencies:? ?(cause: )?", "", text)
    fix = "give each an environment of its own: python -m venv NAME && NAME/bin/pip install ONE"
    return Finding("plan-impossible", "error", subject, text, fix)


def _quoted(subject: str) -> str:
    return " ".join(f'"{part}"' for part in subject.split(" and "))
