"""Called by SGLang's scheduler (``custom_weight_loader``): takes weights, and tells what it holds.

What arrives is one tensor of bytes: a message in JSON. An error that is raised here would end the
engine, so every outcome is written to the file that the message names. Importing this imports no torch.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Do what the message says, in the process that holds the model."""
    ((_, content),) = named_tensors
    message = json.loads(bytes(content.cpu().tolist()))
    try:
        outcome = _do(model, message)
    except Exception as error:  # noqa: BLE001 - told to the trainer, which decides
        place = "".join(traceback.format_exception(error)[-4:])
        outcome = {"error": {"kind": type(error).__name__, "text": str(error), "place": place}}
    path = Path(f"{message['reply']}-{_rank()}")
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(outcome), encoding="utf-8")
    part.rename(path)


def _do(model: Any, message: dict[str, Any]) -> dict[str, Any]:
    if message["op"] == "checksums":
        from posttune_sglang._names import checksums

        return {"checksums": checksums(model)}
    import torch
    from posttune.engines.buckets import open_bucket

    with torch.no_grad():
        model.load_weights(open_bucket(message["bucket"]))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # whoever lent the tensors may change them once this returns
    return {}


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0
