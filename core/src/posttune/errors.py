"""Every error that posttune raises on purpose.

An error says who failed, what happened and what to do next. ``exit_code`` is what the
command line ends with: 2 for the user's mistake, 1 for a failure, 130 for an interrupt.

    PosttuneError (1)
      UserError (2)                 a mistake in what was asked: path, option, data, config
        ConfigError                 all problems of one configuration, together
        DataError                   a source file, a row, a dataset
        ModelError                  a model or tokenizer folder that cannot be used
      PluginError (1)               carries kind, name, distribution, version
        UnknownPlugin (2)           nothing installed bears the name
        DuplicatePlugin (2)         two distributions bear the name
        BlockedPlugin (2)           POSTTUNE_BLOCK forbids it
        ApiMismatch (2)             the distribution does not accept this version of posttune
        PluginOptionsError (2)      its Config refused the options
        PluginLoadError             its module failed to import or its class to be created
        PluginContractError         its hooks do not match the specification
        PluginCallError             a hook raised
        PluginReturnError           a hook returned what its contract forbids
      RunError (1)
        CheckpointError             a checkpoint is damaged, or belongs to another run
        ExportError                 an export failed or its read-back differs
        Interrupted (130)           the user asked to stop; a checkpoint was left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class PosttuneError(Exception):
    """Base of all errors here. ``what`` happened, to ``who``, and the ``fix`` to try next.

    Cure: what the message says after next.
    """

    exit_code = 1

    def __init__(self, what: str, *, who: str = "", fix: str = "") -> None:
        self.what = what
        self.who = who
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.who}: {self.what}" if self.who else self.what
        return f"{head}\n  next: {self.fix}" if self.fix else head


class UserError(PosttuneError):
    """A mistake in what was asked for.

    Cure: what the message says after next.
    """

    exit_code = 2


class DataError(UserError):
    """A source file, a row or a dataset that cannot be used.

    Cure: mend the row that is named, map another column, or skip bad rows with `on_bad_row: skip`.
    """


class ModelError(UserError):
    """A model or tokenizer folder that cannot be used.

    Cure: name a folder that transformers loads, or an earlier stage.
    """


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a configuration: where it stands, what it is, what was probably meant."""

    path: str
    message: str
    file: str = ""
    line: int | None = None
    suggestion: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        parts = [part for part in (place, self.path, self.message) if part]
        text = ": ".join(parts)
        return f"{text} (did you mean {self.suggestion!r}?)" if self.suggestion else text


class ConfigError(UserError):
    """All problems of one configuration, reported together.

    Cure: mend the lines that are named; `posttune config check FILE` tells whether all are right.
    """

    def __init__(self, problems: Sequence[Problem], *, fix: str = "") -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the configuration"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(head + lines, fix=fix)


@dataclass(frozen=True)
class PluginId:
    """Who a plugin is. Empty fields are unknown."""

    kind: str
    name: str
    distribution: str = ""
    version: str = ""
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        origin = f" ({self.distribution} {self.version})" if self.distribution else ""
        label = f" [{self.label}]" if self.label and self.label != self.name else ""
        return f"{self.kind} {self.name!r}{label}{origin}"


class PluginError(PosttuneError):
    """Something is wrong with a plugin; ``plugin`` says which.

    Cure: `posttune doctor PLUGIN` examines it.
    """

    def __init__(self, what: str, *, plugin: PluginId, fix: str = "") -> None:
        self.plugin = plugin
        super().__init__(what, who=str(plugin), fix=fix)


class UnknownPlugin(PluginError):
    """Nothing installed bears the name.

    Cure: correct the name, or install the distribution that the message names.
    """

    exit_code = 2


class DuplicatePlugin(PluginError):
    """Two distributions bear the name.

    Cure: uninstall one of the two, or name one in POSTTUNE_BLOCK.
    """

    exit_code = 2


class BlockedPlugin(PluginError):
    """``POSTTUNE_BLOCK`` forbids it.

    Cure: take it out of POSTTUNE_BLOCK, or name another plugin.
    """

    exit_code = 2


class ApiMismatch(PluginError):
    """The plugin's distribution does not accept this version of posttune.

    Cure: upgrade the plugin, or install a version of posttune that it accepts.
    """

    exit_code = 2


class PluginOptionsError(PluginError):
    """The plugin's ``Config`` refused its options.

    Cure: `posttune plugins show KIND NAME` lists its options.
    """

    exit_code = 2

    def __init__(self, problems: Sequence[Problem], *, plugin: PluginId, fix: str = "") -> None:
        self.problems = list(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems), plugin=plugin, fix=fix)


class PluginLoadError(PluginError):
    """The plugin's module failed to import, or its class to be created.

    Cure: install what is missing (an engine is the extra [engine] of its plugin); else report it to its
    author.
    """


class PluginContractError(PluginError):
    """The plugin's hooks do not match the specification of its kind.

    Cure: its author mends the hooks that are named; the conformance kit finds them before a release.
    """


class PluginCallError(PluginError):
    """A hook raised.

    Cure: the message holds the plugin's own error; a reward can be told what to do then, by `on_error`.
    """


class PluginReturnError(PluginError):
    """A hook returned what its contract forbids.

    Cure: its author mends what is returned; the conformance kit finds it before a release.
    """


class RunError(PosttuneError):
    """A run failed.

    Cure: `posttune run FILE --resume` goes on from the last checkpoint, once the cause is gone.
    """


class CheckpointError(RunError):
    """A checkpoint is damaged, incomplete, or belongs to another run.

    Cure: resume takes the last whole one; name an older one, or begin another run folder.
    """


class ExportError(RunError):
    """An export failed, or what was read back differs from what was trained.

    Cure: nothing was left behind: mend what is named and export again.
    """


class Interrupted(RunError):
    """The user asked to stop. The message names the checkpoint that was left.

    Cure: `posttune run FILE --resume`.
    """

    exit_code = 130
