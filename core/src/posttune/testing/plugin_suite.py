"""What holds for a plugin of any kind. The suites of the kinds are built on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from posttune.config.base import PluginRef
from posttune.testing._probe import Probed, probe

UNKNOWN = "no_such_option_zq"
HOSTILE: tuple[Any, ...] = (None, True, -1, 0, 1e308, "", "zq", "(", [], {}, [None], {"zq": 1})


class PluginSuite:
    """A subclass gives ``name`` and, where it needs any, ``options``.

    ``requires`` holds the optional promises that are checked; a subclass adds to it or takes away.
    """

    kind: ClassVar[str]
    name: str = ""
    options: Mapping[str, Any] = {}
    requires: frozenset[str] = frozenset()

    def ref(self, label: str | None = None) -> PluginRef:
        """The plugin as a configuration names it."""
        assert self.name, f"let {type(self).__name__} say the name of the plugin: name = ..."
        return PluginRef(name=self.name, label=label, options=dict(self.options))

    def member(self) -> Any:
        """A configured instance, behind the one place that calls its hooks."""
        from posttune.pipeline import compose

        return compose(self.kind, [self.ref()])[0]

    def make(self) -> Any:
        """A configured instance, bare."""
        (instance,) = self.member().manager.get_plugins()
        return instance

    def plugin_class(self) -> type:
        """The class that the entry point names."""
        from posttune.catalog import Catalog

        return Catalog().load(self.kind, self.name)

    def probed(self) -> Probed:
        """What a process of its own made of it, in which heavy libraries cannot be imported."""
        return probe(self.kind, self.name, self.options)

    def test_entry_point_resolves(self) -> None:
        """It is installed once, for this version of posttune, and its entry point names a class."""
        from posttune.catalog import Catalog

        entry = Catalog().entry(self.kind, self.name)
        assert entry.status in ("ready", "engine missing", "engine conflict"), entry.reason
        assert isinstance(self.plugin_class(), type)

    def test_name_is_a_word(self) -> None:
        """Lower case letters, digits and underscores: it stands in YAML and in names of metrics."""
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", self.name), self.name

    def test_range_of_posttune_is_said(self) -> None:
        """Its distribution says which versions of posttune it is for, with an upper end."""
        from posttune.catalog import Catalog

        entry = Catalog().entry(self.kind, self.name)
        if entry.distribution != "posttune":
            assert "<" in entry.api or "==" in entry.api or "~=" in entry.api, (
                f"{entry.distribution} requires posttune{entry.api}: say up to which version"
            )

    def test_import_is_light(self) -> None:
        """Neither its import nor its creation asks for a library that takes seconds."""
        assert self.probed().heavy == ()

    def test_composes_in_a_fresh_process(self) -> None:
        """Name and options are all that another process needs."""
        from posttune.hooks import implemented

        found = self.probed()
        assert found.error == ""
        assert list(found.hooks) == implemented(self.kind, self.plugin_class())

    def test_composing_prints_nothing(self) -> None:
        """Standard output belongs to the command: its JSON must stay one document."""
        assert self.probed().stdout == ""

    def test_only_hooks_of_its_kind_and_all_marked(self) -> None:
        """Every hook is one of the kind's, with its arguments, and bears @hookimpl."""
        from posttune.hooks import faults

        assert faults(self.kind, self.plugin_class()) == []

    def test_unknown_option_is_refused(self) -> None:
        """A typo in an option is an error that names the plugin and its options."""
        from posttune.errors import PluginOptionsError
        from posttune.pipeline import validate_options

        wrong = PluginRef(name=self.name, options={**self.options, UNKNOWN: 1})
        refused = None
        try:
            validate_options(self.kind, wrong)
        except PluginOptionsError as error:
            refused = error
        assert refused is not None, f"the option {UNKNOWN} was accepted"
        assert UNKNOWN in str(refused)
        assert self.name in str(refused.plugin)
        assert refused.plugin.distribution in str(refused)

    def test_options_are_documented(self) -> None:
        """Every option has a description: `posttune plugins show` and editors show it."""
        from posttune.pipeline import models_in, options_model

        for model in models_in(options_model(self.kind, self.name)):
            silent = [name for name, info in model.model_fields.items() if not info.description]
            assert not silent, f"{model.__qualname__}: no description of {', '.join(silent)}"

    def test_options_survive_json(self) -> None:
        """The options travel to other processes and into files as JSON, and mean the same there."""
        from posttune.pipeline import validate_options

        config = validate_options(self.kind, self.ref())
        again = validate_options(self.kind, PluginRef(name=self.name, options=config.model_dump(mode="json")))
        assert again == config

    def test_it_says_what_it_does(self) -> None:
        """Its class has a docstring of its own, whose first line lists show."""
        text = self.plugin_class().__doc__ or ""
        inherited = any(text and text == base.__doc__ for base in self.plugin_class().__mro__[1:])
        assert text.strip(), "the class has no docstring"
        assert not inherited, "its docstring is that of a base class"

    def test_composes_twice(self) -> None:
        """Two instances stand side by side, under labels of their own, and share no state."""
        from posttune.pipeline import compose

        first, second = compose(self.kind, [self.ref("first"), self.ref("second")])
        assert (first.label, second.label) == ("first", "second")
        (one,), (two,) = first.manager.get_plugins(), second.manager.get_plugins()
        assert one is not two
        shared = [
            key
            for key, value in vars(one).items()
            if isinstance(value, dict | list | set) and vars(two).get(key) is value
        ]
        assert not shared, f"both instances hold the same {', '.join(shared)}"

    def test_wrong_options_are_refused_by_name(self) -> None:
        """Whatever value an option gets, it is taken or refused with the plugin's name; nothing else."""
        from posttune.errors import PluginOptionsError
        from posttune.pipeline import options_model, validate_options

        for option in options_model(self.kind, self.name).model_fields:
            for value in HOSTILE:
                ref = PluginRef(name=self.name, options={**self.options, option: value})
                message = ""
                try:
                    validate_options(self.kind, ref)
                except PluginOptionsError as error:
                    message = str(error)
                except BaseException as error:
                    text = f"{option}: {value!r} raised {type(error).__name__}: {error}"
                    raise AssertionError(text) from error
                assert not message or (self.name in message and "options" in message), message
