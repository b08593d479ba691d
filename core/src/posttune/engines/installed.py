"""Which distribution of an engine is installed, and whether it can run here. Nothing is imported."""

from __future__ import annotations

import importlib.metadata as metadata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from posttune.errors import UserError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Installed:
    """A distribution of an engine that can be used."""

    distribution: str
    version: Version
    device: Device  # that it is to run on
    folder: Path  # of its package

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Engine:
    """An engine as its plugin knows it."""

    who: str
    name: str
    package: str  # as it is imported
    distributions: Mapping[str, tuple[Device, ...]]  # that install the package, and what each is built for
    oldest: Version
    newest: Version
    install: Mapping[Device, str]  # what to do where it is missing
    compiled: tuple[Device, ...] = ("cpu", "cuda")  # where it runs beside the torch of its requirements only

    @property
    def range(self) -> str:
        """The versions that the plugin knows."""
        return f"{self.oldest} to {self.newest}"

    def find(self, device: str) -> Installed:
        """The one for a device ("cpu", "cuda:0", ...). Raises UserError, each with what to do."""
        kind: Device = "cuda" if device.startswith("cuda") else "cpu"
        found = {name: version for name in self.distributions if (version := _version(name)) is not None}
        spec = find_spec(self.package) if found else None
        if not found or spec is None or not spec.submodule_search_locations:
            what = f"{self.name} is not installed in this environment"
            raise UserError(what, who=self.who, fix=self.install[kind])
        if len(found) > 1:
            both = " and ".join(f"{name} {version}" for name, version in found.items())
            fix = f"make a new environment with one of them: both are the package `{self.package}`"
            raise UserError(f"{both} are installed over each other", who=self.who, fix=fix)
        (name, version), folder = *found.items(), Path(next(iter(spec.submodule_search_locations)))
        engine = Installed(name, Version(version), kind, folder)
        self._check_range(engine)
        self._check_device(engine)
        if kind in self.compiled:
            self._check_torch(engine)
        return engine

    def knows(self, version: Version) -> bool:
        """Whether a version is in the range, which its last given part ends: 0.33 takes in 0.33.2."""
        digits = len(self.newest.release)
        return self.oldest.release <= version.release[:digits] <= self.newest.release

    def _check_range(self, engine: Installed) -> None:
        if not self.knows(engine.version):
            what = f"{engine} is installed; versions {self.range} are supported"
            built = self.distributions[engine.distribution]
            device = engine.device if engine.device in built else built[0]
            raise UserError(what, who=self.who, fix=self.install[device])

    def _check_device(self, engine: Installed) -> None:
        built = self.distributions[engine.distribution]
        if engine.device not in built:
            what = f"{engine} is built for {' and '.join(built)}, and the run is on {engine.device}"
            raise UserError(
                what, who=self.who, fix=f"{self.install[engine.device]}; or run on another device"
            )

    def _check_torch(self, engine: Installed) -> None:
        """Compiled against one torch, it crashes beside any other: at import, or later."""
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
                    again = "another engine in this environment may have replaced torch"
                    raise UserError(what, who=self.who, fix=f"{self.install[engine.device]}; {again}")
                return


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
