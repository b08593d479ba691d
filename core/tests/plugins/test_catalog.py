"""Listing and choosing plugins: nothing is imported, and every refusal says why."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from plugin_wheels import Install, plugin
from posttune import metadata
from posttune.catalog import Catalog, Entry, known_plugins
from posttune.config.models import PluginRef
from posttune.errors import (
    ApiMismatch,
    BlockedPlugin,
    DuplicatePlugin,
    PluginLoadError,
    UnknownPlugin,
    UserError,
)
from posttune.kinds import KINDS
from posttune.metadata import accepts
from posttune.pipeline import compose, load_plugin, validate_options

GOOD = """
from posttune import hookimpl

class Plugin:
    @hookimpl
    def reward_score(self, samples):
        return [1.0 for _ in samples]
"""
EXPLODES = "raise RuntimeError('imported')\n"
CONFIGURED = """
from posttune import hookimpl
from pydantic import BaseModel

class Plugin:
    class Config(BaseModel, extra="forbid"):
        server: str | None = None

        @property
        def needs_engine(self):
            return self.server is None

    def __init__(self, config):
        pass

    @hookimpl
    def reward_score(self, samples):
        return [1.0 for _ in samples]
"""
DRIVER = PluginRef(name="driver")


def entry(name: str, kind: str = "reward", **environ: str) -> Entry:
    return Catalog(environ).entry(kind, name)


def test_listing_imports_nothing(install: Install) -> None:
    install(plugin("explodes", "reward", EXPLODES))
    assert entry("explodes").status == "ready"
    assert Catalog().check("reward", "explodes").distribution == "posttune-explodes"
    assert "posttune_explodes" not in sys.modules


def test_only_the_named_plugin_is_imported(install: Install) -> None:
    install(plugin("explodes", "reward", EXPLODES), plugin("good", "reward", GOOD))
    assert [member.label for member in compose("reward", [PluginRef(name="good")])] == ["good"]
    assert "posttune_explodes" not in sys.modules


def test_entries_are_sorted_and_complete(install: Install) -> None:
    install(plugin("zeta", "reward", GOOD), plugin("alpha", "reward", GOOD))
    names = [each.name for each in Catalog().entries("reward")]
    assert names == sorted(names)
    assert {"alpha", "zeta", "gsm8k"} <= set(names)
    assert {each.kind for each in Catalog().entries()} == set(KINDS)


def test_what_was_installed_a_moment_ago_is_seen(install: Install) -> None:
    with pytest.raises(UnknownPlugin):
        Catalog().load("reward", "fresh")
    install(plugin("fresh", "reward", GOOD))
    assert Catalog().load("reward", "fresh").__name__ == "Plugin"


def test_a_duplicate_names_both_distributions(install: Install) -> None:
    one = plugin("twice", "reward", GOOD)
    install(one, replace(one, distribution="another-twice", version="9.0"))
    with pytest.raises(DuplicatePlugin) as caught:
        Catalog({}).load("reward", "twice")
    message = str(caught.value)
    assert "another-twice 9.0 and posttune-twice 1.2.3 both offer this name" in message
    assert "POSTTUNE_BLOCK=<distribution>" in message
    assert entry("twice").status == "duplicate"


def test_duplicates_are_found_though_not_neighbours(install: Install) -> None:
    one = plugin("twice", "reward", GOOD)
    between = plugin("twicf", "reward", GOOD)
    install(one, between, replace(one, distribution="zzz"), replace(one, distribution="aaa"))
    assert [each.status for each in Catalog({}).entries("reward") if each.name == "twice"] == [
        "duplicate"
    ] * 3


def test_the_same_name_in_two_kinds_is_no_duplicate(install: Install) -> None:
    install(plugin("twice", "reward", GOOD), replace(plugin("twice", "observer", GOOD), distribution="other"))
    assert entry("twice").status == entry("twice", "observer").status == "ready"


def test_blocking_one_of_two_leaves_the_other(install: Install) -> None:
    one = plugin("twice", "reward", GOOD)
    install(one, replace(one, distribution="Another_Twice"))
    catalog = Catalog({"POSTTUNE_BLOCK": "another-twice"})
    assert catalog.check("reward", "twice").distribution == "posttune-twice"
    assert [each.status for each in catalog.entries("reward") if each.name == "twice"] == ["blocked", "ready"]
    assert catalog.load("reward", "twice").__module__ == "posttune_twice"


@pytest.mark.parametrize("block", ["explodes", "posttune-explodes", " gsm8k , Posttune.Explodes "])
def test_a_blocked_plugin_is_not_imported(install: Install, block: str) -> None:
    install(plugin("explodes", "reward", EXPLODES))
    with pytest.raises(BlockedPlugin) as caught:
        Catalog({"POSTTUNE_BLOCK": block}).load("reward", "explodes")
    message = str(caught.value)
    assert message.startswith("reward 'explodes' (posttune-explodes 1.2.3): POSTTUNE_BLOCK forbids it")
    assert "take it out of POSTTUNE_BLOCK" in message


def test_the_block_list_comes_from_the_environment(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(plugin("good", "reward", GOOD))
    monkeypatch.setenv("POSTTUNE_BLOCK", "good")
    with pytest.raises(BlockedPlugin):
        compose("reward", [PluginRef(name="good")])


@pytest.mark.parametrize(
    ("requires", "api"),
    [
        (("posttune>=0.2,<0.3",), "<0.3,>=0.2"),
        (("Posttune ~= 1.0",), "~=1.0"),
        (("posttune[gguf]<0.1",), "<0.1"),
        (('posttune<0.1; python_version >= "3.8"',), "<0.1"),
        (("numpy", "posttune>=0.1", "posttune<0.1"), "<0.1,>=0.1"),
    ],
)
def test_an_api_mismatch_is_known_before_the_import(
    install: Install, requires: tuple[str, ...], api: str
) -> None:
    install(plugin("explodes", "reward", EXPLODES, requires=requires))
    with pytest.raises(ApiMismatch) as caught:
        Catalog().load("reward", "explodes")
    assert "(posttune-explodes 1.2.3): it requires posttune" in str(caught.value)
    assert "this is posttune 0.1" in str(caught.value)
    assert "pip install --upgrade" in str(caught.value)
    assert entry("explodes").api == api
    assert entry("explodes").status == "api mismatch"


@pytest.mark.parametrize(
    "requires",
    [
        (),
        ("posttune",),
        ("posttune>=0.1,<0.2",),
        ('posttune>=7; python_version < "3.0"',),
        ('posttune>=7; extra == "dev"',),
        ("not a requirement !!", "posttune<1"),
        ("posttune-vllm>=7",),
    ],
)
def test_a_range_that_fits(install: Install, requires: tuple[str, ...]) -> None:
    install(plugin("good", "reward", GOOD, requires=requires))
    assert entry("good").status == "ready"


def test_a_requirement_on_posttune_that_cannot_be_read_is_a_mismatch(install: Install) -> None:
    install(plugin("good", "reward", GOOD, requires=("posttune >>> 1",)))
    assert entry("good").status == "api mismatch"
    assert "damaged" in entry("good").reason


def test_a_pre_release_counts_as_its_release() -> None:
    assert accepts(SpecifierSet(">=0.2,<0.3"), "0.2.0.dev3")
    assert not accepts(SpecifierSet("<0.2"), "0.2.0rc1")


@pytest.mark.parametrize(
    ("engine", "status", "reason"),
    [
        ("no-such-engine>=2", "engine missing", "no-such-engine>=2 is not installed"),
        ("pluggy>=99", "engine conflict", "is installed, pluggy>=99 is required"),
    ],
)
def test_the_engine_is_checked_from_metadata(install: Install, engine: str, status: str, reason: str) -> None:
    install(plugin("driver", "reward", GOOD, extras={"engine": (engine,)}))
    found = entry("driver")
    assert found.status == status
    assert reason in found.reason
    for refused in (lambda: Catalog().check("reward", "driver"), lambda: compose("reward", [DRIVER])):
        with pytest.raises(PluginLoadError) as caught:
            refused()
        assert 'pip install "posttune-driver[engine]"' in str(caught.value)
    # What is documented and configured needs no engine.
    assert load_plugin("reward", "driver").__module__ == "posttune_driver"


def test_one_build_of_the_engine_is_enough(install: Install) -> None:
    install(plugin("driver", "reward", GOOD, extras={"engine": ("no-such-engine",), "cpu": ("pluggy>=1",)}))
    assert entry("driver").status == "ready"
    install(plugin("other", "reward", GOOD, extras={"engine": ("no-such-engine",), "cpu": ("no-such-cpu",)}))
    assert entry("other").reason == "no-such-engine is not installed"


def test_options_may_need_no_engine(install: Install) -> None:
    install(plugin("driver", "reward", CONFIGURED, extras={"engine": ("no-such-engine",)}))
    elsewhere = PluginRef(name="driver", options={"server": "http://localhost:1"})
    assert [member.id.name for member in compose("reward", [elsewhere])] == ["driver"]
    validate_options("reward", elsewhere)
    for call in (lambda: compose("reward", [DRIVER]), lambda: validate_options("reward", DRIVER)):
        with pytest.raises(PluginLoadError, match="no-such-engine is not installed"):
            call()


def test_an_engine_that_is_there_and_other_extras_are_no_hindrance(install: Install) -> None:
    extras = {"engine": ("pluggy>=1.7", 'no-such; python_version < "3.0"'), "docs": ("no-such-docs",)}
    install(plugin("good", "reward", GOOD, extras=extras))
    assert entry("good").status == "ready"


def test_an_unknown_name_lists_what_is_installed_and_the_nearest() -> None:
    with pytest.raises(UnknownPlugin) as caught:
        Catalog({}).load("reward", "gms8k")
    message = str(caught.value)
    assert "reward 'gms8k': nothing installed bears this name" in message
    for name in ("format", "function", "gsm8k", "length"):
        assert name in message
    assert "did you mean 'gsm8k'?" in message
    assert "posttune plugins list --kind reward" in message


@pytest.mark.parametrize("name", ["vllm", "vlmm", "VLLM"])
def test_a_known_plugin_that_is_not_installed_has_its_pip_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.entry_points  # here it may be installed, without its engine
    monkeypatch.setattr(
        metadata, "entry_points", lambda *groups: [e for e in real(*groups) if e.name != "vllm"]
    )
    with pytest.raises(UnknownPlugin) as caught:
        Catalog({}).load("rollout_backend", name)
    assert 'pip install "posttune-vllm[engine]"' in str(caught.value)


def test_commands_are_found_apart_from_plugins(install: Install) -> None:
    install(plugin("tool", "command", "Plugin = 'any object'\n"), plugin("toolbad", "command", EXPLODES))
    catalog = Catalog({})
    assert {"tool", "toolbad"} <= {each.name for each in catalog.entries("command")}
    assert "tool" not in {each.name for each in catalog.entries()}
    assert catalog.load_object("command", "tool") == "any object"
    with pytest.raises(PluginLoadError, match=r"command 'toolbad' \(posttune-toolbad 1.2.3\): .*imported"):
        catalog.load_object("command", "toolbad")


def test_a_plugin_of_another_kind_is_pointed_out() -> None:
    with pytest.raises(UnknownPlugin) as caught:
        Catalog({}).load("reward", "console")
    assert "the observer of this name is another kind of plugin" in str(caught.value)


def test_an_unknown_kind() -> None:
    with pytest.raises(UserError) as caught:
        Catalog().entries("rewards")
    assert "did you mean 'reward'?" in str(caught.value)
    assert "rollout_backend" in str(caught.value)


def test_a_damaged_distribution_does_not_hide_the_others(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    site = install(plugin("good", "reward", GOOD), plugin("damaged", "reward", GOOD))
    (points,) = site.glob("posttune_damaged-*/entry_points.txt")
    points.write_text("[posttune.reward]\na line without an equals sign\n", encoding="utf-8")
    assert entry("good").status == "ready"
    assert "posttune-damaged cannot be read" in caplog.text


def test_a_distribution_without_metadata_still_has_a_name(install: Install) -> None:
    site = install(plugin("bare", "reward", GOOD))
    (metadata,) = site.glob("posttune_bare-*/METADATA")
    metadata.unlink()
    assert entry("bare").distribution == "posttune_bare"
    assert Catalog().load("reward", "bare").__name__ == "Plugin"


def test_an_entry_point_of_no_known_form(install: Install) -> None:
    source = plugin("odd", "reward", GOOD)
    install(replace(source, plugins={"reward": {"odd": "a b c!"}}))
    with pytest.raises(PluginLoadError, match="does not read module:attribute"):
        Catalog().load("reward", "odd")


def test_the_known_plugins_have_the_pip_lines_of_this_repository() -> None:
    lines = {name: line for names in known_plugins().values() for name, line in names.items()}
    for path in (Path(__file__).parents[3] / "plugins").glob("*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extra = "[engine]" if "engine" in project.get("optional-dependencies", {}) else ""
        offered = [name for group in project.get("entry-points", {}).values() for name in group]
        assert offered or project["name"] == "posttune-ray"  # a launcher, no plugin by name
        assert all(lines[name] == project["name"] + extra for name in offered)
