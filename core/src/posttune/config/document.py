"""A YAML file as plain data, with the place that every value came from.

YAML 1.2: ``2e-5`` is a number, ``yes`` is text, a duplicate key is an error. Anchors, aliases and
merge keys work; tags that would build objects are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from posttune.errors import ConfigError, Problem

Keys = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file and a line, or an override of the command line."""

    source: str
    line: int | None = None


@dataclass
class Document:
    """Plain data, and the places of its values by path."""

    data: dict[str, Any]
    file: str = ""
    places: dict[Keys, Place] = field(default_factory=dict)
    quoted: set[Keys] = field(default_factory=set)  # texts that stand in quotes

    def place(self, path: Keys) -> Place:
        """Where ``path`` stands, or else the nearest thing around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(self.file)

    def problem(self, path: Keys, message: str, suggestion: str = "") -> Problem:
        """A problem at ``path``."""
        place = self.place(path)
        return Problem(dotted(path), message, place.source, place.line, suggestion)


def dotted(path: Keys) -> str:
    """A path as people write it: ``stages.rl.rewards.0.options``."""
    return ".".join(str(key) for key in path)


def read_document(source: Path | str | Mapping[str, Any]) -> Document:
    """Read a configuration file, or take its data as it stands. Raises ConfigError."""
    if isinstance(source, Mapping):
        return Document(copy.deepcopy(dict(source)))
    return parse(read_text(Path(source)), str(source))


def parse(text: str, file: str) -> Document:
    """Parse the text of a configuration file. Raises ConfigError."""
    reader = _Reader(file)
    try:
        root = reader.yaml.compose(text)
    except MarkedYAMLError as error:
        raise ConfigError([_syntax_problem(error, file)]) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem("", "a character that YAML does not allow", file, line)]) from error
    if root is None or (isinstance(root, ScalarNode) and root.tag == _TAG + "null"):
        raise ConfigError(
            [Problem("", "the file is empty", file)], fix="a configuration has output: and stages:"
        )
    if not isinstance(root, MappingNode):
        line = root.start_mark.line + 1
        raise ConfigError([Problem("", "the top level must be a mapping of keys to values", file, line)])
    data = reader.build(root, ())
    if reader.problems:
        raise ConfigError(reader.problems)
    return Document(data, file, reader.places, reader.quoted)


def parse_value(text: str) -> Any:
    """The value of an override. Raises ConfigError."""
    reader = _Reader("")
    try:
        node = reader.yaml.compose(text)
    except (MarkedYAMLError, ReaderError) as error:
        what = getattr(error, "problem", None) or "a character that YAML does not allow"
        raise ConfigError([Problem("", f"{text!r} is no YAML value: {what}")]) from error
    value = None if node is None else reader.build(node, ())
    if reader.problems:
        raise ConfigError(reader.problems)
    return value


class _Reader:
    """Turns YAML nodes into plain data and notes the line of each value."""

    def __init__(self, file: str) -> None:
        self.yaml = YAML(typ="safe", pure=True)
        self.file = file
        self.places: dict[Keys, Place] = {}
        self.quoted: set[Keys] = set()
        self.problems: list[Problem] = []
        self._open: set[int] = set()

    def build(self, node: Node, path: Keys) -> Any:
        """The value of a node."""
        self.places.setdefault(path, self._place(node))
        if id(node) in self._open:
            return self._refuse(node, path, "a value that contains itself")
        self._open.add(id(node))
        try:
            return self._value(node, path)
        finally:
            self._open.discard(id(node))

    def _value(self, node: Node, path: Keys) -> Any:
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag == _TAG + "timestamp":
            return node.value
        if isinstance(node, ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, path)
        return self._refuse(node, path, f"the tag {node.tag!r}; values are text, numbers, lists and mappings")

    def _scalar(self, node: ScalarNode, path: Keys) -> Any:
        if node.style is not None:
            self.quoted.add(path)
        try:
            return self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError) as error:
            return self._refuse(node, path, f"{node.value!r}: {error}")

    def _mapping(self, node: MappingNode, path: Keys) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merged = {**merged, **self._merge(value_node, path)}
                continue
            key = self._key(key_node, path)
            if key in result:
                self._refuse(key_node, (*path, key), "the key stands here twice")
                continue
            self.places[(*path, key)] = self._place(key_node)
            result[key] = self.build(value_node, (*path, key))
        return {**{key: value for key, value in merged.items() if key not in result}, **result}

    def _key(self, node: Node, path: Keys) -> str:
        if isinstance(node, ScalarNode):
            if node.tag != _TAG + "str":
                self._refuse(node, (*path, node.value), "a key must be text: put it in quotes")
            return str(node.value)
        self._refuse(node, path, "a key must be text")
        return ""

    def _merge(self, node: Node, path: Keys) -> dict[str, Any]:
        parts = node.value if isinstance(node, SequenceNode) else [node]
        result: dict[str, Any] = {}
        for part in parts:
            value = self.build(part, path)
            if not isinstance(value, dict):
                self._refuse(part, path, "<< takes a mapping")
                continue
            result = {**value, **result}
        return result

    def _place(self, node: Node) -> Place:
        return Place(self.file, node.start_mark.line + 1)

    def _refuse(self, node: Node, path: Keys, message: str) -> None:
        self.problems.append(Problem(dotted(path), message, self.file, node.start_mark.line + 1))


def read_text(path: Path) -> str:
    """The text of a configuration file. Raises ConfigError."""
    file = str(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        fix = "check the path; `posttune init` writes a configuration to begin with"
        raise ConfigError([Problem("", "no such file", file)], fix=fix) from error
    except IsADirectoryError as error:
        raise ConfigError([Problem("", "is a folder; name the YAML file in it", file)]) from error
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}", file)]) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem("", "is not UTF-8 text", file, line)]) from error


def _syntax_problem(error: MarkedYAMLError, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    message = error.problem or error.context or "not YAML"
    if "'\\t'" in message:
        message = "a tab; indent with spaces"
    elif "another document" in message:
        message = "a second document (---); a configuration is one document"
    message = message.replace("'<stream end>'", "the end of the file")
    return Problem("", message, file, mark.line + 1 if mark else None)
