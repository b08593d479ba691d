"""The checkpoint exporter: what it reports must be there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posttune.facade.values import shown
from posttune.pipeline import Member
from posttune.types import ExportReport, Verification

if TYPE_CHECKING:
    from posttune.checkpoint.sources import ModelSource

_EXPORT = "checkpoint_exporter_export"
_VERIFY = "checkpoint_exporter_verify"


class Exporter:
    """Writes a model and reads it back."""

    def __init__(self, member: Member) -> None:
        self._member = member

    @property
    def name(self) -> str:
        """The exporter's name."""
        return self._member.id.name

    def export(self, source: ModelSource, destination: Path, dtype: str = "keep") -> ExportReport:
        """Write the model into ``destination``, an existing folder; ``dtype`` is "keep" or a torch name."""
        report = self._member.call(_EXPORT, source=source, destination=destination, dtype=dtype)
        if not isinstance(report, ExportReport):
            raise self._member.wrong(_EXPORT, f"{shown(report)}, not ExportReport")
        absent = [name for name in report.files if not (destination / name).is_file()]
        if absent or not report.files:
            what = f"the file {absent[0]!r}, which is not in {destination}" if absent else "no file"
            raise self._member.wrong(_EXPORT, what)
        if report.parameters <= 0:
            raise self._member.wrong(_EXPORT, f"a count of {report.parameters} parameters")
        return report

    def verify(self, source: ModelSource, destination: Path) -> Verification:
        """Load what was written and compare. The caller decides by ``Verification.passed``."""
        verification = self._member.call(_VERIFY, source=source, destination=destination)
        if not isinstance(verification, Verification):
            raise self._member.wrong(_VERIFY, f"{shown(verification)}, not Verification")
        return verification
