"""The conformance suite of policy losses, over every built-in one and its variants."""

from __future__ import annotations

from typing import Any

import pytest
from posttune.loss import plugins
from posttune.testing.loss_suite import LossSuite

VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "ppo_clip": (plugins.PPOClip, {}),
    "ppo_clip-asymmetric": (plugins.PPOClip, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}),
    "gspo": (plugins.GSPO, {"clip_ratio": 0.1}),
    "cispo": (plugins.CISPO, {"clip_low": 0.2}),
    "cispo-absolute": (plugins.CISPO, {"bounds": "absolute"}),
    "cispo-sequence": (plugins.CISPO, {"level": "sequence"}),
    "sapo": (plugins.SAPO, {}),
    "sapo-sequence": (plugins.SAPO, {"level": "sequence"}),
    "geo_mean": (plugins.GeoMean, {}),
    "dppo_tv": (plugins.DPPOTV, {}),
    "dppo_kl": (plugins.DPPOKL, {}),
    "gpg": (plugins.GPGLoss, {}),
    "luspo": (plugins.LUSPO, {"clip_ratio": 0.1}),
    "luspo-token": (plugins.LUSPO, {"clip_ratio": 0.1, "level": "token"}),
    "vespo": (plugins.VESPO, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
class TestBuiltIn(LossSuite):
    """Each test of the suite for each variant."""

    @pytest.fixture(autouse=True)
    def _choose(self, variant: str) -> None:
        self.variant = variant

    def make(self) -> Any:
        kind, options = VARIANTS[self.variant]
        return kind(kind.Config(**options))  # type: ignore[attr-defined]


def test_every_built_in_loss_is_covered() -> None:
    from importlib.metadata import entry_points

    covered = {kind.__name__ for kind, _ in VARIANTS.values()}
    installed = {point.value.split(":")[1] for point in entry_points(group="posttune.policy_loss")}
    assert not {name for name in installed if hasattr(plugins, name)} - covered
