"""The whole examination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttune.catalog import Catalog
from posttune.doctor.findings import Finding
from posttune.doctor.inventory import Inventory
from posttune.doctor.machine import machine_findings
from posttune.doctor.plan import plan_findings
from posttune.doctor.plugins import chosen, owners, plugin_findings
from posttune.doctor.probe import import_findings


@dataclass(frozen=True)
class Diagnosis:
    """What was found. ``ok``: no finding is an error."""

    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way."""
        return all(finding.severity != "error" for finding in self.findings)


def diagnose(names: Sequence[str] = (), *, imports: bool = False, deadline: float = 180.0) -> Diagnosis:
    """Examine the machine and the plugins; with names only what is meant by them. Raises UserError."""
    inventory, catalog = Inventory(), Catalog()
    wanted = chosen(names, inventory, catalog) if names else owners(inventory)
    findings = list(machine_findings(inventory))
    findings += plugin_findings(inventory, catalog, wanted, named=bool(names))
    if imports:
        findings += import_findings(inventory, wanted, deadline)
    return Diagnosis(findings)


def plan(requirements: Sequence[str], *, deadline: float = 180.0) -> Diagnosis:
    """Whether requirements can be met together. Raises UserError."""
    return Diagnosis(plan_findings(requirements, Inventory(), deadline))
