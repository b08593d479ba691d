"""Objects of the user's own files and packages, named ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import AfterValidator

from posttune.errors import UserError
from posttune.nearest import nearest

_loading = threading.RLock()
_folders: list[Path] = []
_refused: set[Path] = set()


def _names_an_object(value: str) -> str:
    place, _, name = value.rpartition(":")
    if not place or not name:
        raise ValueError("write file.py:name or package.module:name")
    return value


ObjectPath = Annotated[str, AfterValidator(_names_an_object)]
"""A field of a configuration that names an object."""


def also_look_in(folder: Path) -> None:
    """Look for relative files there too, after the working folder and before those named earlier."""
    folder = folder.resolve()
    if folder in _folders:
        _folders.remove(folder)
    _folders.insert(0, folder)


def folders() -> tuple[Path, ...]:
    """Where else relative files are looked for."""
    return tuple(_folders)


def refuse_file(path: Path) -> None:
    """Never run this file: it is the script of the process that started this one."""
    _refused.add(path.resolve())


def anchored(target: str, folder: Path) -> str:
    """A relative file that stands in ``folder``, and not in the working folder, by its whole path."""
    place, _, name = target.rpartition(":")
    if not is_file(target) or Path(place).is_file() or not (folder / place).is_file():
        return target
    return f"{(folder / place).resolve()}:{name}"


def is_file(target: str) -> bool:
    """Whether the target names a file rather than a module."""
    place = target.rpartition(":")[0]
    return place.endswith(".py") or "/" in place or "\\" in place


def load_object(target: str) -> Any:
    """What ``target`` names. A relative file is looked for in the working folder, then in `also_look_in`'s.

    Raises UserError where the file, the module or the name does not exist, and where the user's code
    fails as it is imported.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UserError(
            "the path names no object", who=target, fix="write file.py:name or package.module:name"
        )
    module = _load_file(_find(target, place)) if is_file(target) else _load_module(target, place)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise _no_such_name(target, value, part)
        value = getattr(value, part)
    return value


def _find(target: str, place: str) -> Path:
    path = Path(place).expanduser()
    candidates = [path] if path.is_absolute() else [folder / path for folder in (Path.cwd(), *_folders)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    looked = ", ".join(dict.fromkeys(str(candidate) for candidate in candidates))
    what = "is a folder" if any(candidate.is_dir() for candidate in candidates) else "does not exist"
    raise UserError(f"the file {what}; looked at {looked}", who=target, fix="correct the path")


def _load_file(path: Path) -> ModuleType:
    """Run a file once per process. Its module has a name of its own, so that its objects can be pickled.

    Modules beside the file can be imported from it, unless an installed one bears the same name.
    """
    name = f"posttune_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if path in _refused:
        fix = "move the function to a file of its own, or set executor: thread"
        what = "it is the script that is running, which no worker process may run again"
        raise UserError(what, who=str(path), fix=fix)
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UserError("is not a Python file", who=str(path), fix="let its name end in .py")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, KeyboardInterrupt):
                raise
            raise _broken(str(path), error, str(path)) from error
        return module


def _load_module(target: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            fix = "install it, or write the path of a file, as in my_reward.py:name"
            raise UserError(f"there is no module {error.name!r}", who=target, fix=fix) from error
        raise _broken(target, error, place) from error


def _broken(who: str, error: BaseException, place: str) -> UserError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    at = f" at line {line}" if line else ""
    what = f"importing it failed{at}: {type(error).__name__}: {error}"
    return UserError(what, who=who, fix="mend it; it must import by itself")


def _no_such_name(target: str, holder: Any, name: str) -> UserError:
    likely = nearest(name, [each for each in dir(holder) if not each.startswith("_")])
    hint = f" (did you mean {likely!r}?)" if likely else ""
    return UserError(f"it has no {name!r}{hint}", who=target, fix="name a function that it defines")
