"""The reference pages of the documentation, from the code: hooks, keys, commands, metrics, errors, plugins.

Usage: python tools/reference.py [FOLDER]

Writes docs/reference/*.md, or the same pages into FOLDER. A test holds the pages against what this writes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from posttune import errors, testing, types
from posttune.catalog import Catalog
from posttune.cli.lazy import LazyGroup
from posttune.cli.main import cli
from posttune.config.models import STAGES, RunConfig
from posttune.config.places import PLUGIN_FIELDS, models_of
from posttune.describe import describe, type_text
from posttune.doctor.findings import CODES
from posttune.hooks import MAY_BE_ASYNC, MAY_BE_WRAPPED, hooks_of
from posttune.kinds import KINDS
from posttune.metric_names import GROUPS
from posttune.pipeline import models_in
from posttune.testing import SUITES
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
NOTE = "<!-- Written by tools/reference.py from the code: `make reference`. -->\n\n"
PREFIXED = re.compile(r"[A-Z]\w+")


def cell(text: object) -> str:
    """Text that a table of Markdown holds on one line."""
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;").strip()


def code(text: object) -> str:
    """Text as code in a table."""
    return "`" + " ".join(str(text).split()).replace("|", "\\|") + "`"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines) + "\n"


def summary(thing: Any) -> str:
    """The first paragraph of a docstring."""
    first = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return re.sub(r"\s+", " ", first).replace("``", "`")


# --- hooks ---------------------------------------------------------------------------------------


def hooks_page() -> str:
    """Every kind's hooks, then the types that flow through them."""
    text = "# Hooks\n\n" + NOTE
    text += "How to write a plugin of a kind: the pages under How-to. What checks it: [the kit](kit.md).\n\n"
    text += (
        "A plugin is a class with a `Config`, an `__init__(config)` that does no work, and methods marked "
        "`@hookimpl`. Hooks are called with keywords; take the arguments that you need.\n\n"
    )
    for kind in KINDS.values():
        text += f"## `{kind.name}` {{ #kind-{kind.name} }}\n\n{summary(kind.spec)} "
        text += f"Entry points: `{kind.group}`. Conformance: `posttune.testing.{SUITES[kind.name]}`.\n\n"
        for hook in hooks_of(kind.name).values():
            marks = ["optional" if hook.optional else "required"]
            marks += ["may be async"] if hook.name in MAY_BE_ASYNC else []
            marks += ["may be a wrapper"] if kind.name in MAY_BE_WRAPPED else []
            function = vars(kind.spec)[hook.name]
            text += f"### `{hook.name}`\n\n`{hook.signature}`\n\n{summary(function)} *{', '.join(marks)}*\n\n"
    text += "## Types\n\nFrozen dataclasses of `posttune.types`.\n\n"
    for name, found in vars(types).items():
        if inspect.isclass(found) and found.__module__ == types.__name__:
            text += f"### `{name}` {{ #type-{name.lower()} }}\n\n{summary(found)}\n\n"
            text += table(("field", "type", "is"), list(fields(found)))
    return text


def fields(found: type) -> Iterator[tuple[str, ...]]:
    """Name, type and comment of a dataclass's fields, as the source has them."""
    for line in inspect.getsource(found).splitlines():
        match = re.fullmatch(r"    (\w+): ([^=#]+?)(?: = ([^#]+?))?(?:\s+# (.*))?", line)
        if match:
            name, kind, default, comment = match.groups()
            shown = code(kind) + (
                f", {code(default)} by default" if default and "field(" not in default else ""
            )
            yield code(name), shown, cell(comment or "")


# --- the kit -------------------------------------------------------------------------------------


def kit_page() -> str:
    """Every check of the conformance kit."""
    text = "# The conformance kit\n\n" + NOTE
    text += (
        "`posttune.testing` has a suite for each kind. Subclass it, name the plugin, run pytest; "
        "`posttune new` writes that test. `requires` names the optional promises that are checked; a "
        "subclass adds to it or takes away. For each check a planted fault in our own tests shows that it "
        "objects.\n\n"
    )
    text += "## Every plugin\n\n" + checks(testing.PluginSuite, object)
    for kind, name in SUITES.items():
        suite = getattr(testing, name)
        text += f"## `{name}` {{ #{kind} }}\n\n"
        required = ", ".join(f"`{each}`" for each in sorted(suite.requires))
        text += f"{summary(suite)}" + (f" `requires`: {required} by default." if required else "") + "\n\n"
        text += checks(suite, testing.PluginSuite)
    return text


def checks(suite: type, without: type) -> str:
    """The checks of a suite with what they say, those of another left out."""
    names = [name for name in dir(suite) if name.startswith("test_") and not hasattr(without, name)]
    rows = [
        (code(name.removeprefix("test_").replace("_", " ")), cell(summary(getattr(suite, name))))
        for name in sorted(names, key=lambda name: _line(getattr(suite, name)))
    ]
    return table(("check", "says"), rows)


def _line(function: Any) -> tuple[str, int]:
    """Where a check stands in the source."""
    return function.__code__.co_filename, function.__code__.co_firstlineno


# --- configuration -------------------------------------------------------------------------------


def config_page() -> str:
    """Every model of the configuration with its keys."""
    text = "# Configuration keys\n\n" + NOTE
    text += "What plugins take under `options` is in the [plugin directory](plugins.md).\n\n"
    stages = {model: name for name, model in STAGES.items()}
    others = (found for found in models_in(RunConfig) if found is not RunConfig)
    models: list[type[BaseModel]] = [RunConfig, *others]
    for model in models:
        title = f"Stage `{stages[model]}`" if model in stages else heading(model)
        text += f"## {title}\n\n{summary(model)}\n\n"
        rows = [row(model, name, info) for name, info in model.model_fields.items()]
        text += table(("key", "type", "default", "says"), rows)
    return text


def heading(model: type[BaseModel]) -> str:
    """What a model is called here."""
    return "The file" if model is RunConfig else f"`{model.__name__}`"


def row(model: type[BaseModel], name: str, info: FieldInfo) -> tuple[str, ...]:
    """One key."""
    return code(name), kind_of(info), default_of(info), cell(says(model, name, info))


def says(model: type[BaseModel], name: str, info: FieldInfo) -> str:
    """A key's description; else that of the plugins or of the mapping that it holds. Empty: undocumented."""
    if info.description:
        return info.description
    if name == "kind":
        return "The kind of stage; by default the stage's name."
    if name == "stages":
        return "Stages by name, run in this order."
    kind = PLUGIN_FIELDS.get((model.__name__, name))
    if kind:
        return f"Plugin of the kind {kind}: {KINDS[kind].summary}."
    held = models_of(info.annotation)
    return summary(held[0]) if held else ""


def kind_of(info: FieldInfo) -> str:
    """The type of a key; models by their names."""
    if "stages" in str(info.annotation) or "ConvertStage" in str(info.annotation):
        return "stages"
    text = type_text(info.annotation)
    found = PREFIXED.findall(text)
    text = text.replace("NoneType", "None")
    links = [name for name in found if name.endswith(("Config", "Ref"))]
    return code(text) + "".join(f" [&darr;](#{name.lower()})" for name in links[:1])


def default_of(info: FieldInfo) -> str:
    """A key's default; nothing for a mapping of defaults."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        name = getattr(value, "name", None)
        return code(name) if name else ""
    if isinstance(value, list):
        return code([getattr(each, "name", each) for each in value])
    return code("none" if value is None else value)


# --- commands ------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command of ours."""
    text = "# Commands\n\n" + NOTE
    text += (
        "`python -m posttune` is `posttune`. Exit codes: 0 success, 1 failure, 2 a mistake in what was asked "
        "for, 130 interrupted. With `--json` stdout is one JSON document, also for an error.\n\n"
    )
    for words, command in commands():
        context = click.Context(command, info_name=f"posttune {' '.join(words)}")
        text += f"## posttune {' '.join(words)}\n\n"
        text += f"`{command.get_usage(context).removeprefix('Usage: ')}`\n\n"
        help_text = inspect.cleandoc(command.help or "").replace("\n\n", "\n\n")
        text += f"{help_text}\n\n"
        rows = [
            (code(", ".join(option.opts + option.secondary_opts)), cell(option_help(option, context)))
            for option in command.params
            if isinstance(option, click.Option)
        ]
        text += table(("option", "says"), rows) if rows else ""
    return text


def option_help(option: click.Option, context: click.Context) -> str:
    """An option's help, and what it takes."""
    record = option.get_help_record(context)
    takes = option.make_metavar(context) if not option.is_flag else ""
    told = record[1] if record else ""
    return f"{takes} {told}".strip() if takes else told


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with the words that call it."""
    context = click.Context(cli)
    assert isinstance(cli, LazyGroup)
    for name in cli.table:
        command = cli.get_command(context, name)
        if isinstance(command, click.Group):
            yield from (((name, inner), found) for inner, found in command.commands.items())
        elif command is not None:
            yield (name,), command


# --- metrics, errors, plugins --------------------------------------------------------------------


def metrics_page() -> str:
    """Every metric."""
    text = "# Metrics\n\n" + NOTE
    text += (
        "`metrics.jsonl` of the run folder has one object a step. A key whose quantity does not exist in a "
        "run is absent. All are of all processes together. `<label>` is a plugin's label.\n\n"
    )
    for title, group in GROUPS.items():
        rows = [(code(name), cell(unit), cell(meaning)) for name, (unit, meaning) in group.items()]
        text += f"## {title}\n\n" + table(("metric", "unit", "is"), rows)
    return text


def errors_page() -> str:
    """The tree of errors with cause and cure, and what the doctor finds."""
    text = "# Errors\n\n" + NOTE
    text += (
        "Every message says who, what and, after `next:`, what to do. Exit code 2: a mistake in what was "
        "asked for; 1: a failure. `POSTTUNE_TRACEBACK=1` adds the traceback. All are in "
        "`posttune.errors`.\n\n"
    )
    rows = [
        (
            code(name),
            code(found.__mro__[1].__name__),
            str(found.exit_code),
            cell(summary(found)),
            cell(cure(found)),
        )
        for name, found in error_classes()
    ]
    text += table(("error", "is a", "exit code", "cause", "cure"), rows)
    text += "## What `posttune doctor` finds\n\nEach finding carries its own command.\n\n"
    return text + table(("code", "means"), [(code(name), cell(meaning)) for name, meaning in CODES.items()])


def error_classes() -> Iterator[tuple[str, type[errors.PosttuneError]]]:
    """Every error, bases first."""
    for name, found in vars(errors).items():
        if inspect.isclass(found) and issubclass(found, errors.PosttuneError):
            yield name, found


def cure(found: type) -> str:
    """What the docstring says after "Cure:"."""
    own = inspect.cleandoc(found.__doc__ or "")
    return re.sub(r"\s+", " ", own.partition("Cure:")[2])


def plugins_page() -> str:
    """Every plugin of this repository, with its options."""
    text = "# Plugin directory\n\n" + NOTE
    text += (
        "What is installed where you are: `posttune plugins list`, and `posttune plugins show KIND NAME`.\n\n"
    )
    entries = [entry for entry in Catalog().entries() if entry.distribution in ours()]
    for kind in KINDS:
        text += f"## `{kind}`\n\n"
        for entry in sorted(
            (entry for entry in entries if entry.kind == kind),
            key=lambda each: (each.distribution != "posttune", each.name),
        ):
            found = describe(kind, entry.name)
            origin = "" if entry.distribution == "posttune" else f" `pip install {entry.distribution}`"
            text += f"### `{entry.name}`{{ #{kind}-{entry.name} }}\n\n{cell(found['summary'])}{origin}\n\n"
            rows = [
                (
                    code(option["name"]),
                    code(option["type"]),
                    "required" if option["required"] else code(option["default"]),
                    cell(option["description"]),
                )
                for option in found["options"]
            ]
            text += table(("option", "type", "default", "says"), rows) if rows else ""
    return text


def ours() -> set[str]:
    """The distributions of this repository."""
    files = [ROOT / "core/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")]
    found = (re.search(r'^name = "(.*)"$', file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)
    return {match[1] for match in found if match}


PAGES: dict[str, Callable[[], str]] = {
    "hooks": hooks_page,
    "kit": kit_page,
    "config": config_page,
    "cli": cli_page,
    "metrics": metrics_page,
    "errors": errors_page,
    "plugins": plugins_page,
}


def main(arguments: list[str]) -> int:
    """Write every page."""
    folder = Path(arguments[0]) if arguments else ROOT / "docs/reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(page().rstrip("\n") + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
