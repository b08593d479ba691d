"""docs/data.md names every converter, role and option."""

from __future__ import annotations

import re

import click
import pytest
from data_files import ROOT
from posttune.catalog import Catalog
from posttune.cli.data_cmd import command
from posttune.data.layout import ROLES
from posttune.pipeline import options_model

PAGE = (ROOT / "docs" / "data.md").read_text("utf-8")
OURS = [
    entry.name
    for entry in Catalog().entries()
    if (entry.kind, entry.distribution) == ("data_converter", "posttune")
]


@pytest.mark.parametrize("name", OURS)
def test_converters_and_their_options(name: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    for option in options_model("data_converter", name).model_fields:
        assert f"`{option}`" in line


@pytest.mark.parametrize("name", ["convert", "inspect"])
def test_options(name: str) -> None:
    section = PAGE.split(f"## Options of `{name}`")[1].split("\n## ")[0]
    options = [o for p in command.commands[name].params if isinstance(p, click.Option) for o in p.opts]
    for option in options:
        assert option == "--json" or re.search(rf"`{option}\b", section), option


def test_roles() -> None:
    assert all(f"`{role}`" in PAGE for role in ROLES)
