"""Errors of posttune, from one process to another."""

from __future__ import annotations

from collections.abc import Mapping

from posttune.errors import (
    DataError,
    PluginCallError,
    PluginError,
    PluginId,
    PluginReturnError,
    PosttuneError,
    RunError,
    UserError,
)


def pack_error(error: PosttuneError) -> dict[str, str]:
    """An error as plain data."""
    return {"type": type(error).__name__, "what": error.what, "who": error.who, "fix": error.fix}


def unpack_error(data: Mapping[str, str], plugin: PluginId) -> PosttuneError:
    """The error again; one of a plugin is about ``plugin``, and an unusual one becomes its nearest base."""
    what, who, fix = data["what"], data["who"], data["fix"]
    kind = data["type"]
    for each in (PluginCallError, PluginReturnError):
        if kind == each.__name__:
            return each(what, plugin=plugin, fix=fix)
    for plain in (DataError, UserError, RunError):
        if kind == plain.__name__:
            return plain(what, who=who, fix=fix)
    return PluginError(what, plugin=plugin, fix=fix)
