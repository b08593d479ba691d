"""Files and folders that appear whole or not at all.

Everything is written beside its destination, flushed to the disk and renamed, so a crash at any
moment leaves either what was there before or what was to be written.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttune.errors import UserError


def atomic_write_text(path: Path | str, text: str) -> None:
    """Write a UTF-8 file. Its folder is made where it is missing."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file. Its folder is made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


@contextmanager
def atomic_dir(path: Path | str, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes ``path`` when the block ends, or vanishes when it raises.

    With ``replace`` the folder that is there gives way; between the two renames a crash leaves it
    beside, named ``.<name>.old-…``, and the next call, or `put_back`, puts it in its place again.
    Raises UserError where ``path`` holds something and may not be replaced.
    """
    path = Path(path)
    if not replace:
        refuse_used(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    if not replace:
        refuse_used(path)  # it may be back
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        _fsync_tree(temporary)
        _move_into_place(temporary, path, replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_dir(path.parent)


def fsync_dir(path: Path | str) -> None:
    """Flush a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(temporary: Path, path: Path, replace: bool) -> None:
    if not (replace and path.exists()):
        refuse_used(path)
        temporary.replace(path)
        return
    old = _temporary(path, "old")
    path.replace(old)
    temporary.replace(path)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink()


def refuse_used(path: Path) -> None:
    """Raise UserError where ``path`` holds something; an empty folder is nothing."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise UserError("exists already", who=str(path), fix="choose another place, or remove it first")


def _fsync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
        fsync_dir(root)


def _temporary(path: Path, word: str = "tmp") -> Path:
    return path.parent / f".{path.name}.{word}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", platform.node()) or "host"


def put_back(path: Path) -> None:
    """Give ``path`` back what it held when a process of this machine died between the two renames.

    Where that may not be written nothing changes. Raises nothing.
    """
    for entry in _left_by_the_dead(path, "old"):
        if not path.exists():
            with suppress(OSError):  # another process did it, or the folder may not be written
                entry.rename(path)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes of this machine left while writing ``path``."""
    put_back(path)
    for word in ("tmp", "old"):
        for entry in _left_by_the_dead(path, word):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)


def _left_by_the_dead(path: Path, word: str) -> list[Path]:
    pattern = re.compile(re.escape(f".{path.name}.{word}-{_host()}-") + r"(\d+)-[0-9a-f]{8}")
    found = [(entry, pattern.fullmatch(entry.name)) for entry in path.parent.iterdir()]
    return [entry for entry, match in found if match and not _alive(int(match.group(1)))]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
