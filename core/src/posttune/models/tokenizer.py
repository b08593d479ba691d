"""Tokenizers: a byte-level one that needs no training, and reading and writing folders."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from posttune.errors import ModelError
from posttune.models.tokenizer_class import tokenizer_class

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PretrainedConfig

BYTES = "bytes"
PROBE = "The capital of France is Paris. 2 + 3 = 5; 1234567\n\n  naïve: 日本\n"
SPECIAL = ("<pad>", "<bos>", "<eos>")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_FILES = (
    *_VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_LOCAL_KEYS = ("is_local", "local_files_only", "backend", "name_or_path")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte: ids 0 to 2 are ``<pad>``, ``<bos>``, ``<eos>``, byte ``b`` is ``3 + b``.

    Nothing is added when encoding, and ``decode(encode(text)) == text`` for any valid unicode.
    """
    special = {token: index for index, token in enumerate(SPECIAL)}
    letters = {letter: len(SPECIAL) + byte for byte, letter in enumerate(_byte_letters())}
    backend = Tokenizer(models.BPE(vocab=special | letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level vocabularies, by byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds the files of a tokenizer."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """``"bytes"``, or the tokenizer of a local folder. Raises `ModelError`."""
    if source == BYTES:
        return byte_tokenizer()
    folder = Path(source)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise ModelError(what, who=f"tokenizer {folder}", fix='name a folder with a tokenizer, or "bytes"')
    if not has_tokenizer(folder):
        raise ModelError(
            "the folder holds no tokenizer (no tokenizer.json)",
            who=f"model {folder}",
            fix="copy the tokenizer's files (tokenizer.json, tokenizer_config.json) into the folder; a "
            "configuration may name another one: model: {path: ..., tokenizer: ...}",
        )
    try:
        return (tokenizer_class(folder) or _auto()).from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise ModelError(
            f"the tokenizer cannot be read: {error}", who=f"model {folder}", fix="check tokenizer.json"
        ) from error


def _auto() -> type[AutoTokenizer]:
    from transformers import AutoTokenizer  # imports torch

    return AutoTokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer so that transformers 4 and 5 read it.

    transformers 5 writes a class name that version 4 does not know, and keys about the folder it
    was loaded from. Raises OSError where it cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:  # nothing more exact comes from the library when a write fails
            raise
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error)) from error
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in _LOCAL_KEYS:
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def difference(one: PreTrainedTokenizerBase, two: PreTrainedTokenizerBase) -> str | None:
    """In what two tokenizers differ, on a text with words, digits, spaces and scripts; None in nothing."""
    sides = {
        "number of tokens": (len(one), len(two)),
        "end-of-sequence token": (one.eos_token_id, two.eos_token_id),
        "padding token": (one.pad_token_id, two.pad_token_id),
        "chat template": (one.chat_template, two.chat_template),
        "tokens of a text": (one(PROBE)["input_ids"], two(PROBE)["input_ids"]),
    }
    return next((what for what, (left, right) in sides.items() if left != right), None)


def check_survives(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Raise `ModelError` where transformers would read another tokenizer from a folder of such a model.

    For some model types it puts a class of its own in the place of what the folder holds.
    """
    with tempfile.TemporaryDirectory(prefix="posttune-") as folder:
        config.save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder))
        again = load_tokenizer(folder)
    what = difference(tokenizer, again)
    if what:
        raise ModelError(
            f"transformers reads another tokenizer from a {config.model_type} folder, "
            f"{type(again).__name__}, with another {what}",
            who="model.init",
            fix="choose another model_type, such as llama, or the tokenizer of that family",
        )
