"""GGUF files become Hugging Face folders.

transformers reads the weights; what it loses on the way is mended here by what the file's own
metadata says: how text is split before the merges, which ids end an answer, and numbers that went
through float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import LiveModel
from posttune.errors import ModelError
from posttune.models.hf_folder import without_progress

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Imported:
    """What an import made."""

    path: Path
    name: str
    parameters: int
    dtype: str
    mended: tuple[str, ...]  # what the file's metadata put right
    warnings: tuple[str, ...]  # what could not be known

    def as_json(self) -> dict[str, Any]:
        """The document that ``posttune models import --json`` prints."""
        return {
            "path": str(self.path),
            "name": self.name,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "mended": list(self.mended),
            "warnings": list(self.warnings),
        }


def import_gguf(file: Path, to: Path, *, dtype: str = "bfloat16") -> Imported:
    """Turn a GGUF file into the Hugging Face folder ``to``, which is loaded once before it appears.

    Raises `ModelError` for a file that is no GGUF or of an architecture that transformers cannot read.
    """
    metadata = read_metadata(file)
    model, mended = _read_model(file, metadata)
    tokenizer, mended_too, warnings = _read_tokenizer(file, metadata)
    mended += mended_too
    name = str(metadata.get("general.name") or file.stem)
    licence = metadata.get("general.license")
    origin = f", imported from {file.name}" + (f" (licence: {licence})" if licence else "")
    exported = export_model(LiveModel(model, tokenizer, name=name, origin=origin), to, dtype=dtype)
    report = exported.report
    return Imported(to, name, report.parameters, report.dtype, tuple(mended), tuple(warnings))


def read_metadata(file: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file, but for its lists (vocabulary, merges). Raises `ModelError`."""
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        raise ModelError(
            "the package gguf, which reads such files, is not installed",
            who=str(file),
            fix="pip install 'posttune[gguf]'",
        ) from error
    try:
        fields = GGUFReader(file).fields.values()
        return {field.name: field.contents() for field in fields if field.types[0] != GGUFValueType.ARRAY}
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"is no readable GGUF file: {error}", who=str(file), fix="fetch it again") from error


def _read_model(file: Path, metadata: Mapping[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """A plain float32 model, free of the traces of quantisation."""
    try:
        with without_progress():
            read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (ValueError, OSError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"transformers cannot read it (architecture {metadata.get('general.architecture')}): {error}",
            who=str(file),
            fix="look for the same model as a Hugging Face folder",
        ) from error
    config: PretrainedConfig = read.config
    mended = mend_config(config, type(read).__name__)
    with no_init_weights():
        plain = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.eval()
    plain.generation_config = generation_config(metadata)
    ends = plain.generation_config.eos_token_id
    mended.append(f"generation_config.json: answers end at {ends}")
    return plain, mended


def mend_config(config: PretrainedConfig, architecture: str) -> list[str]:
    """Make the configuration that of a plain model, in place; says what was changed."""
    mended: list[str] = []
    if hasattr(config, "quantization_config"):
        del config.quantization_config
        mended.append("config.json: quantization_config removed, the weights are plain numbers now")
    config.__dict__.pop("_model_name_or_path", None)
    config.architectures = [architecture]
    for name, value in config.to_dict().items():
        if isinstance(value, float) and (short := _as_written(value)) != value:
            setattr(config, name, short)
            mended.append(f"config.json: {name} {value!r} is {short!r}")
    return mended


def _as_written(value: float) -> float:
    """The shortest number with the same float32: 9.999999747378752e-06 was written 1e-05."""
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def generation_config(metadata: Mapping[str, Any]) -> GenerationConfig:
    """Special ids as the file names them; a chat model may have two that end an answer."""

    def named(role: str) -> int | None:
        found = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if found is None else int(found)

    ends = [end for end in dict.fromkeys((named("eos"), named("eot"))) if end is not None]
    return GenerationConfig(
        bos_token_id=named("bos"),
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=named("padding"),
    )


def _read_tokenizer(
    file: Path, metadata: Mapping[str, Any]
) -> tuple[PreTrainedTokenizerBase, list[str], list[str]]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"transformers cannot read its tokenizer: {error}",
            who=str(file),
            fix="take the tokenizer of the model's Hugging Face folder",
        ) from error
    mended, warnings = mend_splitting(tokenizer, metadata)
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if length:
        tokenizer.model_max_length = int(length)
        mended.append(f"tokenizer_config.json: model_max_length {length}")
    return tokenizer, mended, warnings


def mend_splitting(
    tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Split text as ``tokenizer.ggml.pre`` says, in place; returns what was mended, and warnings.

    Only byte-level vocabularies (``tokenizer.ggml.model`` gpt2) are split before the merges.
    """
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return [], []
    name = metadata.get("tokenizer.ggml.pre")
    make = _SPLITTERS.get(str(name))
    if make is None:
        return [], [f"how {name!r} splits text is not known here; transformers' guess was kept"]
    backend = cast(Any, tokenizer).backend_tokenizer
    backend.pre_tokenizer = make()
    backend.decoder = decoders.ByteLevel()
    return [f"tokenizer.json: text is split as {name} does"], []


def _digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _words(number: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(_WORDS % number), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, letters])

    return make


_SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _digits),
    **dict.fromkeys(("gpt-2", "gpt2"), _gpt2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _words(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _words(r"\p{N}")),
}
