"""The suites of estimators and losses: what holds for every plugin, and the invariances.

class TestMine(PolicyLossSuite):
    name = "mine"
    options = {"limit": 2.0}
"""

from __future__ import annotations

from typing import Any, ClassVar

from posttune.testing._streams import stdout_of
from posttune.testing.advantage_suite import AdvantageSuite
from posttune.testing.loss_suite import LossSuite
from posttune.testing.plugin_suite import PluginSuite


class AdvantageEstimatorSuite(PluginSuite, AdvantageSuite):
    """What every advantage estimator must do. See `AdvantageSuite` for what a subclass may declare."""

    kind: ClassVar[str] = "advantage_estimator"

    def make(self) -> Any:
        """A configured instance, bare."""
        return PluginSuite.make(self)

    def test_the_facade_accepts_it(self) -> None:
        """Its returns have the shapes, types and zeros that the trainer relies on."""
        from posttune.facade.algorithms import Estimator

        batch = self.batch(0)
        result = Estimator(self.member()).compute(batch)
        assert result.advantages.shape == batch.packed.mask.shape

    def test_computing_prints_nothing(self) -> None:
        """Standard output belongs to the command."""
        with stdout_of() as output:
            self.compute(self.batch(0))
        assert output.text == ""


class PolicyLossSuite(PluginSuite, LossSuite):
    """What every policy loss must do. See `LossSuite` for what a subclass may declare."""

    kind: ClassVar[str] = "policy_loss"

    def make(self) -> Any:
        """A configured instance, bare."""
        return PluginSuite.make(self)

    def test_the_facade_accepts_it(self) -> None:
        """One value a token with a gradient, and metrics as sums and counts."""
        from dataclasses import replace

        from posttune.facade.algorithms import PolicyLoss

        batch = self.batch(0)
        batch = replace(batch, logp=batch.logp.detach().clone().requires_grad_())
        result = PolicyLoss(self.member()).compute(batch)
        assert result.loss.shape == batch.logp.shape

    def test_computing_prints_nothing(self) -> None:
        """Standard output belongs to the command."""
        with stdout_of() as output:
            self.compute(self.batch(0))
        assert output.text == ""
