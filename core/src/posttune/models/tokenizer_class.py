"""The class of a folder's tokenizer, without `AutoTokenizer`, which imports torch in order to choose one.

That is some 250 MiB, more than all else that a conversion of data holds. The class and its
``from_pretrained`` are those that `AutoTokenizer` comes to, so that the tokenizer is the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast

_CHOOSER = "transformers.models.auto.tokenization_auto"
_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class with two names
_SPECIFIC = ("CohereTokenizer", "GemmaTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")
# Model types with which `AutoTokenizer` takes any of these classes at its word, and with a general one only.
_MODEL_TYPES = (
    *("cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "olmo"),
    *("olmoe", "phi", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
)
_GENERAL_ONLY = ("glm4", "gpt_oss", "granite", "olmo2", "olmo3", "phi3")
_REDIRECTS = {"auto_map", "configuration_files"}  # keys
_MATCHED_BY_NAME = ("allenai", "deepseek-ai", "google", "naver-clova-ix", "salesforce", "stepfun-ai")


def tokenizer_class(folder: Path) -> type[PreTrainedTokenizerFast] | None:
    """The class that `AutoTokenizer` would choose; None where it must be asked.

    It is asked about slow tokenizers, code of a folder's own, and classes and model types that are not listed
    here. Where it was imported already it costs nothing, and may know of more classes.
    """
    if _CHOOSER in sys.modules or not (folder / "tokenizer.json").is_file():
        return None
    settings, config = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    if settings is None or config is None or not _REDIRECTS.isdisjoint([*settings, *config]):
        return None
    name = settings.get("tokenizer_class")
    if name in _GENERAL:
        types: tuple[str, ...] = (*_MODEL_TYPES, *_GENERAL_ONLY)
        return PreTrainedTokenizerFast if not config or config.get("model_type") in types else None
    name = str(name).removesuffix("Fast")
    if name not in _SPECIFIC or _known_by_name(folder, config):
        return None
    types = (*_MODEL_TYPES, "qwen2") if name == "Qwen2Tokenizer" else _MODEL_TYPES
    return getattr(transformers, name) if not config or config.get("model_type") in types else None


def _known_by_name(folder: Path, config: dict[str, Any]) -> bool:
    """Whether `AutoTokenizer` may know the model by its name on the Hub, whatever its files say."""
    names = (folder, config.get("name_or_path"), config.get("_name_or_path"))
    return any(str(name).lower().startswith(_MATCHED_BY_NAME) for name in names)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object of a file; an empty one without the file, None where it holds something else."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError):
        return None
    return found if isinstance(found, dict) and found else None
