"""The reference pages are those that the code gives, and nothing in them is without a word."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from posttune.catalog import Catalog
from posttune.config.base import PluginRef
from posttune.config.models import RunConfig
from posttune.describe import describe
from posttune.doctor.findings import CODES
from posttune.errors import PosttuneError
from posttune.hooks import hooks_of
from posttune.kinds import KINDS
from posttune.metric_names import GROUPS, described
from posttune.pipeline import compose, models_in

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402

PAGES = ROOT / "docs/reference"
INTERNAL = {"samples", "tokens", "update/tokens"}  # taken out before a step is told
COLLECTS = {"mean", "sum", "peak"}
TIMES = {"timed", "took"}


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_the_page_is_current(name: str, tmp_path: Path) -> None:
    right = reference.PAGES[name]().rstrip("\n") + "\n"
    assert (PAGES / f"{name}.md").read_text(encoding="utf-8") == right, "make reference"


def test_every_key_of_the_configuration_has_a_word() -> None:
    silent = [
        f"{model.__name__}.{name}"
        for model in models_in(RunConfig)
        for name, info in model.model_fields.items()
        if not reference.says(model, name, info)
    ]
    assert silent == []


def test_every_option_of_a_plugin_has_a_word() -> None:
    entries = [entry for entry in Catalog().entries() if entry.distribution in reference.ours()]
    silent = [
        f"{entry.kind} {entry.name}: {option['name']}"
        for entry in entries
        for option in describe(entry.kind, entry.name)["options"]
        if not option["description"].strip()
    ]
    assert silent == []
    assert all(describe(entry.kind, entry.name)["summary"] for entry in entries)


def test_every_command_and_option_has_a_word() -> None:
    silent = [
        f"{' '.join(words)} {option.opts}"
        for words, command in reference.commands()
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    silent += [" ".join(words) for words, command in reference.commands() if not command.help]
    assert silent == []


def test_every_hook_has_a_word() -> None:
    assert [hook.name for kind in KINDS for hook in hooks_of(kind).values() if not hook.summary] == []


def test_every_error_has_cause_and_cure() -> None:
    found = dict(reference.error_classes())
    below = {each.__name__ for each in _subclasses(PosttuneError) if each.__module__ == "posttune.errors"}
    assert found.keys() == below | {"PosttuneError"}
    assert [
        name for name, each in found.items() if not (reference.summary(each) and reference.cure(each))
    ] == []
    assert all(CODES.values())


def _subclasses(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def collected() -> Iterator[tuple[str, str]]:
    """Every metric that the trainer collects, ``*`` for what varies, with the module that does."""
    for path in sorted((ROOT / "core/src/posttune/trainer").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            name, does = _text(node.args[0]), node.func.attr
            if (
                name is None
                or getattr(node.func.value, "id", getattr(node.func.value, "attr", "")) != "meter"
            ):
                continue
            if does in COLLECTS and name not in INTERNAL:
                yield name, path.name
            elif does == "spread":
                yield from ((f"{name}/{part}", path.name) for part in ("mean", "std"))
            elif does in TIMES:
                yield f"time/{name}_s", path.name


def _text(node: ast.expr) -> str | None:
    """A literal, or an f-string with * for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def test_every_metric_of_the_trainer_has_a_word() -> None:
    found = dict(collected())
    assert len(found) > 30
    assert {name: module for name, module in found.items() if not described(name) and name != "*/mean"} == {}


def test_every_metric_that_is_described_is_collected_or_told_elsewhere() -> None:
    """A name that no source holds is a left-over."""
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "core/src/posttune").rglob("*.py")
        if path.name != "metric_names.py"
    )
    for name in (name for group in GROUPS.values() for name in group):
        last = name.rpartition("/")[2].removeprefix("pass@").removeprefix("<holder>")
        part = last.removesuffix("_s") if name.startswith("time/") else last
        assert "<" in part or part in sources, name


@pytest.mark.parametrize("kind", ["policy_loss", "advantage_estimator"])
def test_every_metric_of_a_built_in_algorithm_has_a_word(kind: str) -> None:
    from posttune.testing import _batches

    batch = {
        "policy_loss": _batches.random_loss_batch,
        "advantage_estimator": _batches.random_advantage_batch,
    }[kind](0)
    for entry in Catalog().entries(kind):
        if entry.distribution == "posttune":
            (member,) = compose(kind, [PluginRef(name=entry.name)])
            metrics = member.call(f"{kind}_compute", batch=batch).metrics
            assert [name for name in metrics if not described(name)] == [], entry.name


def test_a_metric_without_a_word_is_noticed() -> None:
    assert described("reward/mine/mean")
    assert described("reward/*/seconds_p50")
    assert not described("reward/mine/meen")
    assert not described("time/tea_s")
