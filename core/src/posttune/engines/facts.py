"""What a model folder says of itself: read from config.json and the headers of its weight files."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttune.errors import UserError

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
LARGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class Facts:
    """Of a model. Shapes are by the Hugging Face name of each tensor in its files."""

    architectures: tuple[str, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int | None  # longest sequence; None: not said, or scaled
    tied: bool
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Numbers in the files."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def token_bytes(self, dtype: str) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * SIZES.get(dtype, 4)


def read_facts(folder: Path, who: str) -> Facts:
    """Of a Hugging Face folder. Raises UserError where it is none, in the name of ``who``."""
    outer = _json(folder / "config.json", who)
    config = outer.get("text_config") or outer
    heads = int(config.get("num_attention_heads") or 1)
    hidden = int(config.get("hidden_size") or 0)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = str(scaling.get("rope_type") or scaling.get("type") or "default") != "default"
    positions = config.get("max_position_embeddings")
    return Facts(
        architectures=tuple(outer.get("architectures") or _usual(outer)),
        layers=int(config.get("num_hidden_layers") or 0),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        positions=None if scaled or positions is None else int(positions),
        tied=bool(outer.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        shapes=shapes_of(folder, who),
    )


def _usual(config: dict[str, Any]) -> list[str]:
    from posttune.models.hf_folder import usual_architectures

    return usual_architectures(str(config.get("model_type")))


def shapes_of(folder: Path, who: str) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the safetensors files of a folder; empty where there are none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path, who).items():
            if name != "__metadata__":
                found[name] = tuple(entry["shape"])
    return found


def _header(path: Path, who: str) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        text = file.read(size) if size <= LARGEST_HEADER else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        what = f"{path} is not a safetensors file"
        raise UserError(what, who=who, fix="download or export the model again") from error
    return header


def _json(path: Path, who: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"{path.parent} is no Hugging Face folder: its config.json cannot be read"
        raise UserError(what, who=who, fix="export the model first: posttune export") from error
    return found
