"""Makes a project of the template, whole or not at all."""

from __future__ import annotations

import json
import keyword
import re
import shutil
import tempfile
from pathlib import Path

from posttune.errors import UserError

TEMPLATE = Path(__file__).parent
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LONGEST = 60


def bake(kind: str, name: str, *, author: str = "", description: str | None = None, folder: Path) -> Path:
    """The folder of the new project. Raises UserError for a name or text that would make a broken one."""
    _check(name, author, description)
    try:
        from cookiecutter.main import cookiecutter
    except ModuleNotFoundError as error:
        what, fix = "cookiecutter is not installed", 'pip install "posttune[new]"'
        raise UserError(what, who="posttune new", fix=fix) from error
    said = {"kind": kind, "name": name, "author": _literal(author or "Your Name")}
    if description is not None:
        said["description"] = _literal(description)
    if not folder.is_dir():
        raise UserError("no such folder", who=str(folder), fix="make it, or name another with --in")
    place = folder / f"posttune-{name.replace('_', '-')}"
    if place.exists():
        raise UserError("is there already", who=str(place), fix="choose another name, or remove it")
    with tempfile.TemporaryDirectory(prefix="posttune-new-") as work:
        settings = {"cookiecutters_dir": work, "replay_dir": str(Path(work, "replay"))}
        made = cookiecutter(
            str(TEMPLATE), no_input=True, output_dir=work, extra_context=said, default_config=settings
        )
        shutil.move(made, place)
    return place


def _literal(text: str) -> str:
    """The text as an expression of jinja, so that braces in it are text."""
    return "{{ " + json.dumps(text) + " }}"


def _check(name: str, author: str, description: str | None) -> None:
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or len(name) > LONGEST:
        what = f"{name!r} cannot name a plugin"
        fix = f"use lower case letters, digits and single underscores, at most {LONGEST}"
        raise UserError(what, who="posttune new", fix=fix)
    if name.startswith("posttune"):
        what, fix = f"{name!r} would be posttune_{name} as a package", "leave posttune out of the name"
        raise UserError(what, who="posttune new", fix=fix)
    for text in (author, description):
        if text and not text.isprintable():
            raise UserError(f"{text!r} is not one line of text", who="posttune new", fix="write one line")
    if description is not None and not description.strip():
        raise UserError("the description is empty", who="posttune new", fix="say what the plugin does")
