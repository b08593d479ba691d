"""Writing a model as a Hugging Face folder, and the one way in which any exporter is run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from posttune.checkpoint.card import card
from posttune.checkpoint.lora_exporter import NAME as ADAPTERS
from posttune.checkpoint.precheck import check_destination, check_dtype
from posttune.checkpoint.sources import ModelSource
from posttune.checkpoint.space import free_bytes, shortage
from posttune.config.models import PluginRef
from posttune.errors import ExportError, PluginCallError
from posttune.facade import build_exporter
from posttune.files import atomic_dir
from posttune.models.hf_folder import TOKEN, is_classifier, usual_architectures
from posttune.types import ExportReport, Verification

SHARD_BYTES = 5 * 10**9
_ROWS = tuple(
    f"{name}.weight"
    for name in ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
)


@dataclass(frozen=True)
class Exported:
    """An export that was read back and found equal."""

    path: Path
    report: ExportReport
    verification: Verification

    def as_json(self) -> dict[str, Any]:
        """The document that ``posttune export --json`` prints."""
        return {
            "files": list(self.report.files),
            "parameters": self.report.parameters,
            "dtype": self.report.dtype,
            "max_abs_logit_difference": self.verification.max_abs_logit_difference,
        }


def export_model(
    source: ModelSource,
    destination: Path,
    *,
    dtype: str = "keep",
    exporter: PluginRef | None = None,
    replace: bool = False,
) -> Exported:
    """Write ``source`` to ``destination``, read it back, and only then let the folder appear.

    ``dtype``: "keep" (that of the source's weights), float32, bfloat16 or float16. ``replace``: a
    folder that is there gives way, else it is a UserError. Raises `ExportError` where what was read
    back differs, and then leaves nothing.
    """
    check_dtype(dtype)
    writer = build_exporter(exporter or PluginRef(name="hf"))
    check_destination(destination, replace=replace)
    needed = source.size() * (source.dtype if dtype == "keep" else getattr(torch, dtype)).itemsize
    adapters = writer.name == ADAPTERS
    what = "" if adapters else shortage(destination, needed)
    if what:
        raise ExportError(what, who=str(destination), fix="make room, or export to another disk")
    try:
        with atomic_dir(destination, replace=replace) as temporary:
            report = writer.export(source, temporary, dtype)
            verification = writer.verify(source, temporary)
            _refuse_difference(destination, verification)
            _make_readable(temporary)
    except (OSError, SafetensorError, PluginCallError) as error:
        cause = _why_not_written(error)
        if cause is None:
            raise
        size = (
            "" if adapters else f" (about {needed:,} bytes are needed, {free_bytes(destination):,} are free)"
        )
        raise ExportError(
            f"could not be written: {cause}{size}", who=str(destination), fix="make room, then try again"
        ) from error
    return Exported(destination, report, verification)


def _why_not_written(error: BaseException) -> str | None:
    """What the disk said; None where an exporter failed for another reason."""
    cause = error.__cause__ if isinstance(error, PluginCallError) else error
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return str(cause) if isinstance(cause, SafetensorError) else None


def _refuse_difference(destination: Path, found: Verification) -> None:
    if not found.passed:
        raise ExportError(
            f"what was read back answers differently: logits differ by {found.max_abs_logit_difference:.3g}, "
            f"allowed are {found.tolerance:.3g}",
            who=str(destination),
            fix="nothing was kept; export with --dtype keep, and report this if it fails too",
        )


def _make_readable(folder: Path) -> None:
    """safetensors makes its files readable by their owner alone."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def write_model(
    source: ModelSource, folder: Path, dtype: str = "keep", *, shard_bytes: int = SHARD_BYTES
) -> ExportReport:
    """Write weights, configuration, tokenizer, generation configuration and a model card into ``folder``.

    Adapters are merged, tied weights are written once, padding of the vocabulary is left out. Raises
    `ExportError` where the rows of the embedding are not the configuration's vocabulary.
    """
    torch_dtype = source.dtype if dtype == "keep" else cast(torch.dtype, getattr(torch, dtype))
    name = str(torch_dtype).removeprefix("torch.")
    tensors = (
        (key, export_tensor(tensor, torch_dtype))
        for key, tensor in rows_as_configured(source, source.tensors())
    )
    parameters = _write_shards(tensors, folder, shard_bytes)
    _write_config(source, folder, torch_dtype)
    source.write_companions(folder)
    (folder / "README.md").write_text(_card(source, parameters, name), encoding="utf-8")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return ExportReport(files=tuple(files), parameters=parameters, dtype=name)


def export_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as it is written: on the CPU, floats in ``dtype``, with a storage of its own size."""
    tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def rows_as_configured(
    source: ModelSource, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with the vocabulary's padding cut off: rows beyond ``vocab_size`` that no token has.

    Raises `ExportError` where rows are missing, or some that have a token would be cut.
    """
    rows = source.config.get_text_config().vocab_size
    for name, tensor in tensors:
        if name.endswith(_ROWS) and tensor.shape[0] != rows:
            tokens = len(source.tokenizer)
            if tensor.shape[0] < rows or tokens > rows:
                what = f"{name} has {tensor.shape[0]} rows, the configuration says vocab_size {rows}"
                what += f", the tokenizer has {tokens} tokens"
                fix = "the weights and the configuration are not of one model"
                raise ExportError(what, who="export", fix=fix)
            tensor = tensor[:rows]
        yield name, tensor


def _write_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, limit: int) -> int:
    """Write files of at most ``limit`` bytes (one tensor at least) and return the number of parameters."""
    shards: list[list[str]] = []
    parameters, size = 0, 0
    for number, shard in enumerate(_groups(tensors, limit)):
        save_file(shard, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        parameters += sum(tensor.numel() for tensor in shard.values())
        size += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return parameters
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": size, "total_parameters": parameters}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return parameters


def _groups(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    yield group


def _write_config(source: ModelSource, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(source.config)
    config.dtype = dtype
    config.architectures = config.architectures or usual_architectures(config.model_type)
    config.save_pretrained(folder)


def _card(source: ModelSource, parameters: int, dtype: str) -> str:
    task, kind, call = "text-generation", "model", '("Hello", max_new_tokens=20)'
    head = next((str(name) for name in source.config.architectures or ()), "")
    usage = "from transformers import pipeline\n\n"
    if is_classifier(source.config):
        task, kind, call = "text-classification", "reward model", '("A prompt and its answer")'
    usage += f'print(pipeline("{task}", model="path/of/this/folder"){call})'
    if head.endswith(TOKEN):
        task, kind = "token-classification", "critic"
    if task == "token-classification" or source.part == "critic":
        kind = "critic"
        usage = (
            "from posttune import HFModel\n\n"
            'critic = HFModel("path/of/this/folder", is_critic=True)  # a value for every token'
        )
    return card(
        name=source.name,
        family=source.config.model_type,
        kind=kind,
        parameters=parameters,
        dtype=dtype,
        origin=source.origin,
        usage=usage,
        task=task,
        place=source.place,
    )
