"""From a YAML file and overrides to a validated configuration.

Two steps: :func:`load_config` knows the core's schema and imports no plugin; :func:`validate_plugins`
asks each named plugin's ``Config``. :func:`check_config` does both and reports everything together.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from posttune.config.document import Document, dotted, read_document
from posttune.config.environment import resolve_environment, without_values
from posttune.config.extends import problem_of_key, read_extended
from posttune.config.models import RunConfig
from posttune.config.overrides import apply_overrides
from posttune.config.places import NamedPlugin, named_plugins
from posttune.config.problems import schema_problems
from posttune.config.validate import fill_kinds, rule_problems
from posttune.errors import ConfigError, PluginError, PluginOptionsError, Problem
from posttune.nearest import nearest

if TYPE_CHECKING:
    from posttune.catalog import Catalog


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and the document that it came from."""

    config: RunConfig
    document: Document

    @property
    def folder(self) -> Path:
        """The folder of the file; the working folder where there is no file."""
        return Path(self.document.file).parent

    def plain(self) -> dict[str, Any]:
        """The resolved configuration, every default filled in, as plain data that may be shown."""
        return self.config.told()

    def to_yaml(self) -> str:
        """The resolved configuration as YAML; loading it gives an equal configuration."""
        return dump_yaml(self.plain())


def load_config(source: Path | str | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a file (or plain data), apply overrides, and check it against the core's schema.

    Raises ConfigError with every problem. Imports no plugin.
    """
    document, config, problems = _load(source, overrides)
    if config is None or problems:
        raise _failure(problems)
    return LoadedConfig(config, document)


def validate_plugins(loaded: LoadedConfig) -> None:
    """Resolve every named plugin and check its options. Raises ConfigError with every problem."""
    problems = list(_plugin_problems(loaded.document, loaded.config.model_dump(mode="json")))
    if problems:
        raise _failure(without_values(problems, loaded.document, loaded.config._references))


def check_config(source: Path | str | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Both steps, all problems together. Raises ConfigError."""
    document, config, problems = _load(source, overrides)
    data = config.model_dump(mode="json") if config else document.data
    found = list(_plugin_problems(document, data))
    problems += without_values(found, document, config._references) if config else found
    if config is None or problems:
        raise _failure(problems)
    return LoadedConfig(config, document)


def dump_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML, keys in order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.allow_unicode = True
    yaml.width = 100
    buffer = io.StringIO()
    yaml.dump(dict(data), buffer)
    return buffer.getvalue()


def _load(
    source: Path | str | Mapping[str, Any], overrides: Sequence[str]
) -> tuple[Document, RunConfig | None, list[Problem]]:
    document = read_extended(read_document(source))
    fill_kinds(document)
    problems = apply_overrides(document, overrides)
    fill_kinds(document)
    resolved = resolve_environment(document)
    config = None
    try:
        config = RunConfig.model_validate(document.data)
        config._references.update(resolved.references)
    except ValidationError as error:
        problems += problem_of_key(schema_problems(error, document))
    problems += rule_problems(document)
    unresolved = {each.path for each in resolved.problems}  # what stands there still is no value
    found = without_values(problems, document, resolved.references)
    return document, config, resolved.problems + [each for each in found if each.path not in unresolved]


def _failure(problems: Sequence[Problem]) -> ConfigError:
    ordered = sorted(problems, key=lambda problem: problem.line or 0)
    return ConfigError(ordered, fix="`posttune config schema` writes what an editor needs to complete keys")


def _plugin_problems(document: Document, data: Mapping[str, Any]) -> Iterator[Problem]:
    from posttune.catalog import Catalog

    catalog = Catalog()
    for named in named_plugins(data):
        yield from _problems_of(document, named, catalog)


def _problems_of(document: Document, named: NamedPlugin, catalog: Catalog) -> Iterator[Problem]:
    from posttune.pipeline import validate_options

    try:
        validate_options(named.kind, named.ref, catalog)
    except PluginOptionsError as error:
        for problem in error.problems:
            yield _located(document, named, problem)
    except PluginError as error:
        message = f"{error.what} (next: {error.fix})" if error.fix else error.what
        yield document.problem((*named.path, "name"), f"{error.plugin}: {message}")


def _located(document: Document, named: NamedPlugin, problem: Problem) -> Problem:
    """A plugin's problem with its options, at its line of the file."""
    inner = tuple(int(key) if key.isdigit() else key for key in problem.path.split(".") if key)
    path = (*named.path, *inner)
    suggestion = problem.suggestion or nearest(str(path[-1]), named.model.model_fields)
    place = document.place(path)
    return replace(problem, path=dotted(path), file=place.source, line=place.line, suggestion=suggestion)
