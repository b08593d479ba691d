"""An error as plain data, for scripts: what ``--json`` prints in place of a result."""

from __future__ import annotations

from typing import Any

import click

from posttune.errors import ConfigError, PluginError, PluginOptionsError, PosttuneError

DISK = "check the path, that you may read and write there, and the room on the disk"


def failure_of(error: BaseException) -> dict[str, Any]:
    """``code`` (the class), ``who``, ``what``, ``next``; ``problems`` and ``plugin`` where there are any."""
    if isinstance(error, PosttuneError):
        return _ours(error)
    if isinstance(error, click.Abort):
        return _failure("Interrupted", "", "interrupted", "")
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        path = context.command_path if context else "posttune"
        return _failure(type(error).__name__, path, error.format_message(), f"{path} --help")
    if isinstance(error, OSError) and error.filename is not None:
        return _failure(type(error).__name__, str(error.filename), error.strerror or str(error), DISK)
    what = f"{type(error).__name__}: {error}"
    return _failure("InternalError", "posttune", what, "report this, with the traceback on stderr")


def _failure(code: str, who: str, what: str, fix: str) -> dict[str, Any]:
    return {"code": code, "who": who, "what": what, "next": fix}


def _ours(error: PosttuneError) -> dict[str, Any]:
    found = _failure(type(error).__name__, error.who, error.what, error.fix)
    if isinstance(error, ConfigError | PluginOptionsError):
        found["problems"] = error.problems
    if isinstance(error, PluginError):
        plugin = error.plugin
        found["plugin"] = {
            "kind": plugin.kind,
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
        }
    return found
