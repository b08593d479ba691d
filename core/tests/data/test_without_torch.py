"""A conversion whose tokenizer is loaded without torch equals one that loads it with `AutoTokenizer`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import transformers
from data_files import write_jsonl
from data_tokenizers import CHATML, CORPUS, chatml, llama, spaced
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.data.conversion import ConvertRequest, convert
from posttune.models import tokenizer_class as module
from posttune.models.tokenizer import load_tokenizer, save_tokenizer
from posttune.models.tokenizer_class import tokenizer_class
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

pytestmark = pytest.mark.slow

LAZY = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18),
    reason="this transformers imports torch with any tokenizer",
)
TOOLS = (
    "{{ bos_token }}{% if tools %}[tools] {{ tools | tojson }} {{ strftime_now('%Y') }}\n{% endif %}"
    "{%- for m in messages %}\n"
    "    {%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}\n"
    "    {%- if m.content is none %}{% continue %}{% endif %}\n"
    "[{{ m.role }}] {{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson(indent=1) }}</call>{% endfor %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": [1]}'}}
TOOL = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Be brief <s>."},
            {"role": "user", "content": " weather?\n"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "21"},
            {"role": "assistant", "content": "21 °C 🎉 </s>"},
        ],
        "tools": TOOL,
    },
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four  clips"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "system", "content": "late"},
            {"role": "assistant", "content": "b"},
        ]
    },
]
PAIRS = [{"prompt": f"{n} clips <s>", "response": f" naïve\u0301 日本\t{n * n}</s> x"} for n in range(40)]


def wordpiece() -> PreTrainedTokenizerFast:
    """Lower case, with [CLS] and [SEP] around, and settings of padding and truncation in the file."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_padding(pad_id=0, pad_token="[PAD]", length=8)
    backend.enable_truncation(16)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), special, strict=True)),
        clean_up_tokenization_spaces=True,
        model_max_length=16,
    )


def unigram() -> PreTrainedTokenizerFast:
    """As SentencePiece makes them, with BOS and EOS, and tokens that strip the space beside them."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*CORPUS, "weather? Zürich 0123456789 <call>{}</call>"], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    backend.add_tokens([AddedToken("<call>", lstrip=True), AddedToken("clips", single_word=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TOOLS
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    return tokenizer


def qwen() -> PreTrainedTokenizerFast:
    """A class that builds its rules from the vocabulary."""
    found: PreTrainedTokenizerFast = Qwen2Tokenizer(
        vocab=chatml().get_vocab(), merges=[], chat_template=CHATML
    )
    found.eos_token = found.pad_token = "<|im_end|>"
    return found


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": chatml,
    "bpe": lambda: llama(TOOLS),
    "split": lambda: llama(),
    "spaced": spaced,
    "wordpiece": wordpiece,
    "unigram": unigram,
    "qwen": qwen,
}
ALL = pytest.mark.parametrize("name", MAKERS)
PARTS = (
    "<s>",
    "</s>",
    "<|im_end|>",
    "<|extra|>",
    " <call> ",
    "[SEP]",
    "clips",
    " ",
    "\n",
    "é",
    "日本",
    "🎉",
    "don 't",
)
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=8).map("".join)


@cache
def folder_of(name: str) -> Path:
    folder = Path(mkdtemp()) / name
    save_tokenizer(MAKERS[name](), folder)
    return folder


@cache
def loaded(name: str) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """One tokenizer without `AutoTokenizer`, one with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHOOSER", "not imported")
        assert tokenizer_class(folder_of(name)) is not None
        light = load_tokenizer(folder_of(name))
    return light, AutoTokenizer.from_pretrained(folder_of(name), local_files_only=True)


@ALL
def test_the_same_tokenizer(name: str) -> None:
    light, auto = loaded(name)
    assert type(light) is type(auto)
    assert light.backend_tokenizer.to_str() == auto.backend_tokenizer.to_str()
    assert light.special_tokens_map == auto.special_tokens_map
    assert light.init_kwargs == auto.init_kwargs

    @settings(deadline=None, max_examples=60)
    @given(st.lists(TEXTS, min_size=1, max_size=3), st.booleans())
    def check(texts: list[str], special: bool) -> None:
        ours, theirs = (
            each(texts, add_special_tokens=special, return_offsets_mapping=True) for each in (light, auto)
        )
        assert dict(ours) == dict(theirs)
        for ids in ours["input_ids"]:
            assert light.decode(ids) == auto.decode(ids)
            assert light.decode(ids, skip_special_tokens=True) == auto.decode(ids, skip_special_tokens=True)

    check()


@pytest.mark.parametrize("name", [name for name in MAKERS if MAKERS[name]().chat_template])
@pytest.mark.parametrize("chat", CHATS[:2])
def test_the_same_rendering(name: str, chat: dict[str, Any]) -> None:
    light, auto = loaded(name)
    tools = json.loads(chat["tools"]) if "tools" in chat else None
    for prompt in (True, False):
        ours, theirs = (
            each.apply_chat_template(
                chat["messages"], tools=tools, add_generation_prompt=prompt, tokenize=False
            )
            for each in (light, auto)
        )
        assert ours == theirs


def converted(rows: list[dict[str, Any]], name: str, to: Path) -> dict[str, bytes]:
    """The files of a conversion."""
    source = write_jsonl(to.parent / "rows.jsonl", rows)
    template = "auto" if MAKERS[name]().chat_template else "none"
    request = ConvertRequest([source], to, tokenizer=folder_of(name), template=template, on_bad_row="skip")
    convert(request)
    return files(to)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows_for(name: str) -> list[dict[str, Any]]:
    return CHATS if MAKERS[name]().chat_template else PAIRS


@ALL
def test_the_same_dataset(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = converted(rows_for(name), name, tmp_path / "auto")
    monkeypatch.setattr(module, "_CHOOSER", "not imported")
    assert converted(rows_for(name), name, tmp_path / "light") == expected
    assert {"train.bin", "meta.json", "tokenizer.json", "tokenizer_config.json"} <= set(expected)


def convert_apart(rows: list[dict[str, Any]], name: str, to: Path, jobs: int) -> list[str]:
    """Convert in a new process. Returns which heavy libraries it imported."""
    source = write_jsonl(to.parent / "rows.jsonl", rows)
    template = "auto" if MAKERS[name]().chat_template else "none"
    code = f"""
import sys
from posttune.cli.main import main
arguments = ["data", "convert", {str(source)!r}, "--to", {str(to)!r}, "--tokenizer", {str(folder_of(name))!r}]
code = main([*arguments, "--template", {template!r}, "--on-bad-row", "skip", "--jobs", "{jobs}"])
assert not code, code
print("IMPORTED", *(each for each in ("torch", "transformers") if each in sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, env=os.environ
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith("IMPORTED"))
    return line.split()[1:]


@LAZY
@pytest.mark.parametrize(("name", "jobs"), [("bpe", 1), ("unigram", 2), ("qwen", 1), ("split", 2)])
def test_no_torch_in_a_process_that_converts(name: str, jobs: int, tmp_path: Path) -> None:
    expected = converted(rows_for(name), name, tmp_path / "auto")
    assert convert_apart(rows_for(name), name, tmp_path / "apart", jobs) == ["transformers"]
    assert files(tmp_path / "apart") == expected


def test_the_check_sees_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = folder_of("split") / "tokenizer_config.json"
    kept = settings.read_text()
    settings.write_text(kept.replace("PreTrainedTokenizerFast", "MyTokenizer"))
    try:
        assert convert_apart(PAIRS, "split", tmp_path / "apart", 1) == ["torch", "transformers"]
    finally:
        settings.write_text(kept)
