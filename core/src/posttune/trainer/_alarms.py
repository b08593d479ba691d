"""Signs that a run goes wrong: a metric beyond its limit for some steps in a row."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttune.config.models import RlStage

log = logging.getLogger("posttune.trainer")


@dataclass(frozen=True)
class Rule:
    """Rings once ``metric`` has been beyond ``limit`` for ``patience`` steps in a row."""

    name: str
    metric: str
    limit: float
    above: bool  # beyond is above it; else below
    patience: int = 1
    stop: bool = False  # ends the run

    def beyond(self, value: float) -> bool:
        """Whether a value is on the wrong side."""
        return value > self.limit if self.above else value < self.limit

    def sentence(self, value: float) -> str:
        """What is wrong."""
        side = "above" if self.above else "below"
        for_long = "" if self.patience == 1 else f" for {self.patience} steps in a row"
        return f"alarm {self.name}: {self.metric} is {side} {self.limit:g}{for_long}; now {value:.4g}"


def rules_of(stage: RlStage) -> list[Rule]:
    """The alarms that a stage asks for."""
    asked, mismatch = stage.alarms, stage.mismatch
    stop = asked.on_alarm == "stop"
    found = [
        (name, metric, limit, above)
        for name, metric, limit, above in (
            ("entropy", "entropy", asked.entropy_below, False),
            ("reward_std", "reward/std", asked.reward_std_below, False),
            ("length_above", "tokens/completion", asked.length_above, True),
            ("length_below", "tokens/completion", asked.length_below, False),
        )
        if limit is not None
    ]
    rules = [
        Rule(name, metric, limit or 0.0, above, asked.patience, stop) for name, metric, limit, above in found
    ]
    if mismatch.alarm is not None:
        metric, stop = "rollout/logprob_gap_mean", mismatch.on_alarm == "stop"
        rules.append(Rule("logprob_gap", metric, mismatch.alarm, above=True, stop=stop))
    return rules


class Alarms:
    """Watches the metrics of every step. Its state belongs in the checkpoint."""

    def __init__(self, rules: Sequence[Rule], *, speaks: bool = True) -> None:
        self.rules = rules
        self._speaks = speaks
        self._in_a_row = {rule.name: 0 for rule in rules}

    def look(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str | None]:
        """``alarm/<name>``, 1 or 0, of every rule, and why the run should end, if it should.

        A metric that the step lacks changes nothing. An alarm is logged when it begins to ring.
        """
        found: dict[str, float] = {}
        end: str | None = None
        for rule in self.rules:
            value = metrics.get(rule.metric)
            if value is not None:
                self._in_a_row[rule.name] = self._in_a_row[rule.name] + 1 if rule.beyond(value) else 0
                end = self._heard(rule, value) or end
            found[f"alarm/{rule.name}"] = float(self._in_a_row[rule.name] >= rule.patience)
        return found, end

    def _heard(self, rule: Rule, value: float) -> str | None:
        count = self._in_a_row[rule.name]
        if count == rule.patience and self._speaks:
            log.warning("%s", rule.sentence(value))
        return rule.sentence(value) if rule.stop and count >= rule.patience else None

    def state_dict(self) -> dict[str, int]:
        """Steps in a row by name."""
        return dict(self._in_a_row)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from ``state``."""
        self._in_a_row |= {name: state[name] for name in self._in_a_row if name in state}
