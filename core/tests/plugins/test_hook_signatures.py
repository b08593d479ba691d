"""The hooks are a promise to plugin authors: their snapshot moves with the API's version only."""

from __future__ import annotations

import inspect
import json

import posttune
import pytest
from posttune.hooks import OPTIONAL, hooks_of, signatures
from posttune.kinds import KINDS
from write_hook_signatures import SNAPSHOT, text


def test_the_snapshot_is_that_of_the_code() -> None:
    saved = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert saved == signatures(), (
        "the hook signatures changed: plugins depend on them. If that is meant, move posttune.API "
        "and run python core/tests/plugins/write_hook_signatures.py"
    )
    assert saved["api"] == posttune.API
    assert SNAPSHOT.read_text(encoding="utf-8") == text()


@pytest.mark.parametrize("kind", KINDS)
def test_every_hook_is_annotated_documented_and_bears_the_prefix(kind: str) -> None:
    hooks = hooks_of(kind)
    assert hooks
    for hook in hooks.values():
        assert hook.name.startswith(KINDS[kind].prefix)
        assert hook.summary.endswith(".")
        parameters = inspect.signature(getattr(KINDS[kind].spec, hook.name)).parameters.values()
        assert all(each.annotation is not each.empty for each in list(parameters)[1:])


def test_the_table_of_optional_hooks_names_hooks_that_exist() -> None:
    for kind, names in OPTIONAL.items():
        assert names <= set(hooks_of(kind))


def test_optional_is_what_the_specification_calls_so_and_every_hook_of_an_observer() -> None:
    for kind, each in KINDS.items():
        for hook in hooks_of(kind).values():
            said = "Optional" in (inspect.getdoc(getattr(each.spec, hook.name)) or "")
            assert said == (hook.optional and kind != "observer"), hook.name
