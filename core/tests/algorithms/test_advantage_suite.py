"""The conformance suite of estimators, over every built-in one and its variants."""

from __future__ import annotations

import math
from typing import Any

import pytest
from posttune.advantage import plugins
from posttune.testing.advantage_suite import AdvantageSuite

INVARIANT = {"shift_invariant": True, "scaling": "invariant"}
EQUIVARIANT = {"shift_invariant": True, "scaling": "equivariant"}

VARIANTS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "gae": (plugins.GAE, {"gamma": 0.97, "lam": 0.9}, {}),
    "gae-raw": (plugins.GAE, {"gamma": 0.97, "lam": 0.9, "whiten": False}, {}),
    "gae-zero": (plugins.GAE, {"lam": 0.9, "mask_mode": "zero", "ddof": 0}, {}),
    "grpo": (plugins.GRPO, {}, INVARIANT),
    "grpo-eps0": (plugins.GRPO, {"eps": 0}, INVARIANT),
    "grpo-ddof0": (plugins.GRPO, {"ddof": 0}, INVARIANT),
    "grpo-batch": (plugins.GRPO, {"scale": "batch"}, INVARIANT | {"constant_group_is_zero": True}),
    "grpo-none": (plugins.GRPO, {"scale": "none"}, EQUIVARIANT),
    "grpo-raw": (plugins.GRPO, {"singleton": "raw"}, INVARIANT),
    "dr_grpo": (plugins.DrGRPO, {}, EQUIVARIANT),
    "rloo": (plugins.RLOO, {}, EQUIVARIANT),
    "rloo-standardised": (
        plugins.RLOO,
        {"standardise": True, "eps": 1e-8},
        INVARIANT | {"constant_group_is_zero": True},
    ),
    "reinforce_plus_plus": (plugins.ReinforcePlusPlus, {"gamma": 0.95}, {"scaling": "invariant"}),
    "reinforce_plus_plus-raw": (
        plugins.ReinforcePlusPlus,
        {"gamma": 0.95, "whiten": False},
        {"scaling": "equivariant"},
    ),
    "reinforce_plus_plus_baseline": (
        plugins.ReinforcePlusPlusBaseline,
        {},
        INVARIANT | {"constant_group_is_zero": True},  # where all groups are constant, the batch is
    ),
    "reinforce_plus_plus_baseline-raw": (plugins.ReinforcePlusPlusBaseline, {"whiten": False}, EQUIVARIANT),
    "remax": (plugins.ReMax, {}, {}),
    "opo": (plugins.OPO, {}, EQUIVARIANT),
    "gpg": (plugins.GPG, {}, {"scaling": "equivariant", "constant_group_is_zero": True}),
    "grpo_passk": (plugins.GRPOPassK, {}, INVARIANT),
    "grpo_passk-raw": (plugins.GRPOPassK, {"scale": False}, EQUIVARIANT),
    "gdpo": (plugins.GDPO, {"weights": {"first": 0.3}}, INVARIANT | {"constant_group_is_zero": True}),
    "gdpo-sequences": (plugins.GDPO, {"whiten": "sequences"}, INVARIANT | {"constant_group_is_zero": True}),
    "gdpo-none": (plugins.GDPO, {"whiten": "none"}, INVARIANT),
}


@pytest.mark.parametrize("variant", VARIANTS)
class TestBuiltIn(AdvantageSuite):
    """Each test of the suite for each variant."""

    @pytest.fixture(autouse=True)
    def _choose(self, variant: str) -> None:
        self.variant = variant
        for name, value in VARIANTS[variant][2].items():
            setattr(self, name, value)

    def make(self) -> Any:
        kind, options, _ = VARIANTS[self.variant]
        return kind(kind.Config(**options))  # type: ignore[attr-defined]

    def bound(self, size: int) -> float | None:
        if self.variant in ("grpo", "grpo-eps0", "grpo-raw", "gdpo-none"):
            return (size - 1) / math.sqrt(size)
        if self.variant == "grpo-ddof0":
            return math.sqrt(size - 1)
        return None


def test_every_built_in_estimator_is_covered() -> None:
    from importlib.metadata import entry_points

    covered = {kind.__name__ for kind, _, _ in VARIANTS.values()}
    installed = {point.value.split(":")[1] for point in entry_points(group="posttune.advantage_estimator")}
    assert not {name for name in installed if hasattr(plugins, name)} - covered
