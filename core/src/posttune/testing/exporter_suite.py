"""Conformance of a checkpoint exporter.

class TestMine(CheckpointExporterSuite):
    name = "mine"

``requires``: ``whole`` (all parameters are written, and the count says so), ``dtype`` (the type that was
asked for is the one written), ``damage`` (verification notices a damaged file), ``transformers`` (the
folder loads in transformers and answers alike; override ``reload`` for another reader).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttune.testing._streams import stdout_of
from posttune.testing.plugin_suite import PluginSuite

if TYPE_CHECKING:
    import torch

_GAP = {"float32": 1e-4, "bfloat16": 0.1}


class CheckpointExporterSuite(PluginSuite):
    """What every exporter must do."""

    kind: ClassVar[str] = "checkpoint_exporter"
    requires = frozenset({"whole", "dtype", "damage", "transformers"})

    def write_source(self, folder: Path) -> Path:
        """A small model to export. Override where the exporter is for another sort."""
        from posttune.testing.tiny import tiny_model

        return tiny_model(folder, layers=1, hidden=32, heads=1)

    def reload(self, folder: Path) -> Any:
        """What was written, as a model that answers."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder)

    @contextlib.contextmanager
    def exported(self, dtype: str = "keep") -> Iterator[tuple[Any, Path, Any]]:
        """Source, folder and report of an export."""
        from posttune.checkpoint.sources import open_source
        from posttune.facade.exporter import Exporter

        with tempfile.TemporaryDirectory(prefix="posttune-kit-") as name:
            source = open_source(self.write_source(Path(name, "source")))
            destination = Path(name, "export")
            destination.mkdir()
            yield source, destination, Exporter(self.member()).export(source, destination, dtype)

    def verify(self, source: Any, destination: Path) -> Any:
        """What reading it back shows."""
        from posttune.facade.exporter import Exporter

        return Exporter(self.member()).verify(source, destination)

    def logits(self, model: Any) -> torch.Tensor:
        """Of a fixed row of tokens."""
        import torch

        with torch.inference_mode():
            found: torch.Tensor = model.eval()(torch.arange(5, 21)[None]).logits.float()
        return found

    def test_what_is_written_is_reported(self) -> None:
        """Every file of the folder is in the report, and none that is not there."""
        with self.exported() as (_, folder, report):
            assert _files(folder) == set(report.files)

    def test_verification_passes(self) -> None:
        """It reads back what it wrote, and compares tokens."""
        with self.exported() as (source, folder, _):
            found = self.verify(source, folder)
            assert found.passed, found
            assert found.checked_tokens > 0

    def test_it_answers_as_before(self) -> None:
        """Loaded by what it is meant for, the model has the same logits."""
        if "transformers" in self.requires:
            with self.exported() as (source, folder, _):
                gap = (self.logits(self.reload(folder)) - self.logits(source.load_merged())).abs().max()
                assert float(gap) < _GAP["float32"]

    def test_verification_notices_other_weights(self) -> None:
        """A folder with weights of another model does not pass."""
        with self.exported() as (_, folder, _report), _other(self) as other:
            assert not _passes(self, other, folder)

    def test_verification_notices_damage(self) -> None:
        """A weight file with changed bytes, or cut short, does not pass."""
        if "damage" not in self.requires:
            return
        for spoil in (_flip, _cut):
            with self.exported() as (source, folder, _):
                spoil(max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0))
                assert not _passes(self, source, folder), spoil.__name__

    def test_parameters_are_counted(self) -> None:
        """As many as the model has, tied ones once."""
        if "whole" in self.requires:
            with self.exported() as (source, _, report):
                assert report.parameters == source.load_merged().num_parameters()

    def test_the_type_is_that_which_was_asked_for(self) -> None:
        """bfloat16 is written and reported as such, and still passes."""
        if "dtype" in self.requires:
            with self.exported("bfloat16") as (source, folder, report):
                assert report.dtype == "bfloat16"
                assert self.verify(source, folder).passed
                if "transformers" in self.requires:
                    assert str(self.reload(folder).dtype) == "torch.bfloat16"

    def test_keep_keeps_the_type(self) -> None:
        """The source's own type is reported where none was asked for."""
        with self.exported() as (source, _, report):
            assert report.dtype == str(source.dtype).removeprefix("torch.")

    def test_the_source_is_left_alone(self) -> None:
        """Nothing is written but into the destination."""
        with self.exported() as (source, folder, _):
            kept = {path: path.read_bytes() for path in source.path.rglob("*") if path.is_file()}
            around = {path.name for path in folder.parent.iterdir()}
            self.verify(source, folder)
            assert {path.name for path in folder.parent.iterdir()} == around == {"source", "export"}
            assert kept == {path: path.read_bytes() for path in source.path.rglob("*") if path.is_file()}

    def test_no_file_names_the_temporary_folder(self) -> None:
        """The folder is renamed afterwards: a path inside it would lead nowhere."""
        with self.exported() as (_, folder, _report):
            name = str(folder).encode()
            assert [
                path.name for path in folder.rglob("*") if path.is_file() and name in path.read_bytes()
            ] == []

    def test_it_repeats_itself(self) -> None:
        """The same model gives the same weights."""
        with self.exported() as (_, first, one), self.exported() as (_, second, two):
            assert one.files == two.files
            largest = max(one.files, key=lambda name: (first / name).stat().st_size)
            assert (first / largest).read_bytes() == (second / largest).read_bytes()

    def test_a_failed_export_leaves_nothing(self) -> None:
        """Through core's export: the folder appears once it is whole and verified, else not at all."""
        from posttune.checkpoint._export import export_model
        from posttune.checkpoint.sources import open_source
        from posttune.errors import PosttuneError

        with tempfile.TemporaryDirectory(prefix="posttune-kit-") as name:
            source = open_source(self.write_source(Path(name, "source")))
            blocked = Path(name, "export")
            blocked.write_text("a file, where the folder should be", encoding="utf-8")
            with contextlib.suppress(PosttuneError):
                export_model(source, blocked, exporter=self.ref())
                raise AssertionError("it wrote over a file")
            assert {path.name for path in Path(name).iterdir()} == {"source", "export"}
            whole = Path(name, "whole")
            export_model(source, whole, exporter=self.ref())
            assert {path.name for path in Path(name).iterdir()} == {"source", "export", "whole"}

    def test_exporting_prints_nothing(self) -> None:
        """Standard output belongs to the command."""
        with stdout_of() as output, self.exported() as (source, folder, _):
            self.verify(source, folder)
        assert output.text == ""


@contextlib.contextmanager
def _other(suite: CheckpointExporterSuite) -> Iterator[Any]:
    """A model of the same shape with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    from posttune.checkpoint.sources import open_source

    with tempfile.TemporaryDirectory(prefix="posttune-kit-") as name:
        folder = suite.write_source(Path(name, "other"))
        for file in folder.glob("*.safetensors"):
            generator = torch.Generator().manual_seed(1)
            weights = load_file(file)
            moved = {
                key: torch.randn(each.shape, generator=generator).to(each.dtype)
                for key, each in weights.items()
            }
            save_file(moved, file, metadata={"format": "pt"})
        yield open_source(folder)


def _passes(suite: CheckpointExporterSuite, source: Any, folder: Path) -> bool:
    """Whether verification is content; an error of any sort means that it is not."""
    from posttune.errors import PosttuneError

    try:
        return bool(suite.verify(source, folder).passed)
    except PosttuneError:
        return False


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(255 - byte for byte in data[middle : middle + 4096])
    path.write_bytes(bytes(data))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
