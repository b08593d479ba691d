"""What an engine said, as one of posttune's errors: what happened and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttune.errors import PosttuneError, RunError, UserError

LESS_MEMORY = (
    "lower rollout.resources.memory_share, rollout.resources.max_sequences or "
    "rollout.sampling.max_new_tokens; of training, packing.micro_batch_tokens"
)
TRACEBACK = "Traceback (most recent call last)"
SHOWN = 300  # characters of a line of a log
HF_TAKES_IT = "rollout.name hf takes every causal model of transformers"


@dataclass(frozen=True)
class Told:
    """An error as the engine's process reported it."""

    kind: str  # the class's name
    text: str
    place: str = ""  # the last lines of its traceback


@dataclass(frozen=True)
class Rule:
    """Patterns of an engine's messages, and what they mean."""

    patterns: tuple[str, ...]
    what: str
    fix: str
    user: bool = True
    memory: bool = False


@dataclass(frozen=True)
class Explainer:
    """Rules of one engine, the first that fits counts; ``more`` is how to make it say more."""

    who: str
    rules: Sequence[Rule]
    more: str

    def explain(self, told: Told, step: str, ledger: str = "") -> PosttuneError:
        """The error for what the engine raised while it did ``step`` ("start", "wake up", ...)."""
        first = told.text.strip().splitlines()[0] if told.text.strip() else "(no message)"
        said = f"{told.kind}: {first}"
        for rule in self.rules:
            if any(re.search(pattern, f"{told.kind}: {told.text}") for pattern in rule.patterns):
                return self._by(rule, step, said, ledger)
        place = f"\n{told.place}" if told.place else ""
        fix = f"see the engine's own message above; {self.more}"
        return RunError(f"the engine failed at {step}: {said}{place}", who=self.who, fix=fix)

    def read(self, lines: Sequence[str], step: str, ledger: str = "") -> PosttuneError | None:
        """The error for a line of the engine's log, the last that a rule fits; None where none does.

        An engine whose own workers die may end without an answer: then its log is all that there is. What
        stands before its first traceback are warnings, of modules that it can do without.
        """
        first = next((place for place, line in enumerate(lines) if TRACEBACK in line), len(lines))
        for line in reversed(lines[first:]):
            for rule in self.rules:
                if any(re.search(pattern, line) for pattern in rule.patterns):
                    return self._by(rule, step, line.strip()[:SHOWN], ledger)
        return None

    def _by(self, rule: Rule, step: str, said: str, ledger: str) -> PosttuneError:
        what = f"{rule.what}, at {step}: {said}"
        if rule.memory and ledger:
            what += f"\n{ledger}"
        error = UserError if rule.user else RunError
        return error(what, who=self.who, fix=rule.fix)
