"""Every way in which a plugin can be broken: a real distribution each, and what its message says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from plugin_wheels import Install, Source, plugin
from posttune.config.models import PluginRef
from posttune.errors import PluginContractError, PluginError, PluginLoadError
from posttune.pipeline import compose

HEAD = "from posttune import hookimpl\n"


@dataclass(frozen=True)
class Case:
    """A broken plugin, and the words that its error must hold."""

    source: Source
    error: type[PluginError]
    words: tuple[str, ...]

    @property
    def kind(self) -> str:
        return next(iter(self.source.plugins))

    @property
    def name(self) -> str:
        return next(iter(self.source.plugins[self.kind]))


def reward(name: str, body: str, error: type[PluginError], *words: str) -> Case:
    return Case(plugin(name, "reward", HEAD + body), error, words)


def method(name: str, body: str, *words: str, kind: str = "reward") -> Case:
    """A class with the given methods, which break the contract."""
    lines = "\n".join("    " + line for line in body.splitlines())
    return Case(plugin(name, kind, f"{HEAD}class Plugin:\n{lines}\n"), PluginContractError, words)


CASES = [
    reward(
        "importerror",
        "import no_such_engine\n",
        PluginLoadError,
        "ModuleNotFoundError",
        "no_such_engine",
        "posttune_importerror.py:2",
        "install the module 'no_such_engine'",
    ),
    reward(
        "badname",
        "from json import no_such_name\n",
        PluginLoadError,
        "ImportError",
        "no_such_name",
        "reinstall or upgrade posttune-badname",
    ),
    reward("syntax", "class Plugin(:\n", PluginLoadError, "SyntaxError", "posttune_syntax.py"),
    reward(
        "exits", "import sys\nsys.exit(3)\n", PluginLoadError, "called sys.exit(3)", "posttune_exits.py:3"
    ),
    reward(
        "asserts", "assert 1 == 2, 'a broken premise'\n", PluginLoadError, "AssertionError: a broken premise"
    ),
    reward(
        "generatorexit", "raise GeneratorExit('odd')\n", PluginLoadError, "GeneratorExit: odd", "report this"
    ),
    reward(
        "classcrash",
        "class Plugin:\n    limit = 1 / 0\n",
        PluginLoadError,
        "ZeroDivisionError: division by zero",
        "posttune_classcrash.py:3",
    ),
    reward("noclass", "Other = 1\n", PluginLoadError, "AttributeError", "Plugin"),
    reward("notaclass", "Plugin = 'text'\n", PluginContractError, "names a str, not a class", "module:Class"),
    method(
        "misspelt",
        "@hookimpl\ndef reward_scroe(self, samples): return []",
        "reward_scroe is marked @hookimpl, and reward has no such hook; did you mean reward_score?",
        "the hook reward_score(samples: Sequence[Sample]) -> Sequence[Score] is missing",
    ),
    method(
        "unmarked",
        "def reward_score(self, samples): return []",
        "reward_score is a hook but is not marked @hookimpl",
    ),
    method(
        "unmarkedoptional",
        "def reward_needs(self): ...\n@hookimpl\ndef reward_score(self, samples): return []",
        "reward_needs is a hook but is not marked @hookimpl",
    ),
    method(
        "otherkind",
        "@hookimpl\ndef reward_score(self, samples): return []\n"
        "@hookimpl\ndef observer_step(self, stage, step, metrics): ...",
        "observer_step is a hook of the kind observer, not of reward",
    ),
    method(
        "badargument",
        "@hookimpl\ndef reward_score(self, sample): return []",
        "reward_score has no argument sample (it has: samples); did you mean samples?",
    ),
    method(
        "baddefault",
        "@hookimpl\ndef reward_score(self, samples, smaples=None): return []",
        "reward_score has no argument smaples",
    ),
    method(
        "kwonly",
        "@hookimpl\ndef reward_score(self, *, samples): return []",
        "take samples as a plain argument",
    ),
    method(
        "kwargs",
        "@hookimpl\ndef reward_score(self, **everything): return []",
        "takes *everything, which is never filled",
    ),
    method("missing", "def score(self, samples): return []", "the hook reward_score", "is missing"),
    method(
        "missingnear",
        "def reward_scores(self, samples): return []",
        "is missing; did you mean that by reward_scores?",
    ),
    method("hookless", "pass", "it has no hook at all; observer has", kind="observer"),
    method(
        "wrapped",
        "@hookimpl(wrapper=True)\ndef policy_loss_compute(self, batch): return (yield)\n"
        "@hookimpl\ndef policy_loss_traits(self): ...",
        "policy_loss_compute is a wrapper, and policy_loss takes none",
        kind="policy_loss",
    ),
    method(
        "asyncloss",
        "@hookimpl\nasync def policy_loss_compute(self, batch): ...\n"
        "@hookimpl\ndef policy_loss_traits(self): ...",
        "policy_loss_compute must not be async",
        kind="policy_loss",
    ),
    method(
        "needsconfig",
        "def __init__(self, config): ...\n@hookimpl\ndef reward_score(self, samples): return []",
        "cannot be created: missing a required argument: 'config'",
        "no arguments, as it has no Config",
    ),
    reward(
        "initcrash",
        "class Plugin:\n    def __init__(self): raise OSError('disk on fire')\n"
        "    @hookimpl\n    def reward_score(self, samples): return []\n",
        PluginLoadError,
        "creating Plugin raised OSError: disk on fire",
        "move work into the hooks",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_error_says_who_what_and_what_next(case: Case, install: Install) -> None:
    install(case.source)
    with pytest.raises(case.error) as caught:
        compose(case.kind, [PluginRef(name=case.name)])
    message = str(caught.value)
    who = f"{case.kind} {case.name!r} ({case.source.distribution} {case.source.version}): "
    assert message.startswith(who)
    for words in case.words:
        assert words in message
    assert "\n  next: " in message
    assert caught.value.fix


def test_all_faults_come_together(install: Install) -> None:
    body = HEAD + (
        "class Plugin:\n"
        "    @hookimpl\n    def observer_step(self, stages, metrics): ...\n"
        "    @hookimpl\n    def observer_stop(self): ...\n"
        "    def observer_checkpoint(self, path): ...\n"
    )
    install(plugin("several", "observer", body))
    with pytest.raises(PluginContractError) as caught:
        compose("observer", [PluginRef(name="several")])
    for words in ("did you mean stage?", "observer_stop is marked", "observer_checkpoint is a hook but"):
        assert words in str(caught.value)


def test_an_interrupt_at_import_passes(install: Install) -> None:
    install(plugin("interrupts", "reward", "raise KeyboardInterrupt\n"))
    with pytest.raises(KeyboardInterrupt):
        compose("reward", [PluginRef(name="interrupts")])


def test_arguments_may_be_a_subset_and_have_defaults(install: Install) -> None:
    body = HEAD + (
        "class Plugin:\n"
        "    @hookimpl\n"
        "    def observer_step(self, metrics, stage=None, width=80):\n"
        "        self.seen = (metrics, stage, width)\n"
    )
    install(plugin("subset", "observer", body))
    (member,) = compose("observer", [PluginRef(name="subset")])
    member.call("observer_step", stage="rl", step=1, metrics={"kl": 0.5})
    (instance,) = member.manager.get_plugins()
    assert instance.seen == ({"kl": 0.5}, "rl", 80)
