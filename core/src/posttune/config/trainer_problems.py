"""A trainer's ``config`` read: what is wrong with it, in the names that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from posttune.config.places import models_of
from posttune.config.problems import describe_error, suggest_key
from posttune.config.trainer_options import Goes, TrainerOptions
from posttune.errors import ConfigError, Problem

Choice = TypeVar("Choice", bound=TrainerOptions)


def read_options(model: type[Choice], config: object) -> Choice:
    """Validate a trainer's ``config``. Raises ConfigError with every problem and the nearest right name."""
    if config is not None and not isinstance(config, Mapping):
        problem = Problem("config", f"must be a dict of sections, not a {type(config).__name__}")
        raise ConfigError([problem], fix='write config={"training": {"batch_size": 16}}')
    try:
        return model.model_validate(dict(config or {}))
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors(include_url=False)]
    raise ConfigError(
        problems, fix=f"the sections are {', '.join(model.model_fields)}; see docs/python_api.md"
    )


@contextmanager
def in_terms_of(model: type[TrainerOptions], stage: str) -> Iterator[None]:
    """Let a ConfigError about the stage name the fields of the trainer's ``config`` instead."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_renamed(model, stage, each) for each in error.problems], fix=error.fix) from error


def _renamed(model: type[TrainerOptions], stage: str, problem: Problem) -> Problem:
    inner = problem.path.removeprefix(f"stages.{stage}.")
    if inner == problem.path:
        return problem
    for section, info in model.model_fields.items():
        for options in models_of(info.annotation):
            for name, field in options.model_fields.items():
                paths = [
                    path for marker in field.metadata if isinstance(marker, Goes) for path in marker.paths
                ]
                if inner in paths:
                    return replace(problem, path=f"config.{section}.{name}")
    return replace(problem, path=inner)


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every option as ``section.name``, with its description."""
    for section, info in model.model_fields.items():
        inner = models_of(info.annotation)
        if section == "observers" or not inner:
            yield section, info.description or ""
            continue
        for name, field in inner[0].model_fields.items():
            yield f"{section}.{name}", field.description or ""


def _problem(model: type[TrainerOptions], detail: ErrorDetails) -> Problem:
    location = [str(part) for part in detail["loc"]]
    path = ".".join(["config", *location])
    if detail["type"] != "extra_forbidden":
        return Problem(path, describe_error(detail))
    return Problem(path, "unknown key", suggestion=_meant(model, location))


def _meant(model: type[TrainerOptions], location: Sequence[str]) -> str:
    """The key that was probably meant: in the same section, or of another one."""
    section, key = location[0], location[-1]
    if len(location) == 1:
        return suggest_key(key, model)
    known = [path for path, _ in fields_of(model)]
    elsewhere = next((path for path in known if path.partition(".")[2] == key), "")
    inner = models_of(model.model_fields[section].annotation) if section in model.model_fields else []
    return elsewhere or (suggest_key(key, inner[0]) if inner else "")
