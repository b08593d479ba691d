from __future__ import annotations

from collections.abc import Callable

import pytest
from data_files import ROOT, SHARED, need
from data_tokenizers import CORPUS, chatml, llama, spaced
from hypothesis import given, settings
from hypothesis import strategies as st
from posttune.data.piecewise import _PATTERNS, word_table
from posttune.models.tokenizer import byte_tokenizer, load_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PARTS = st.sampled_from(
    [
        " ",
        "  ",
        "\n",
        "\t",
        "'s",
        "the",
        "clips",
        "7",
        "48",
        "x",
        "<s>",
        "<|im_end|>",
        "é",
        "日本",
        "🎉",
        "!",
        "\u00a0",
        "\x1c",
        "0.5",
    ]
)
TEXTS = st.lists(PARTS, max_size=25).map("".join) | st.text(max_size=30)


def trained(pattern: str | None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first = (
        pre_tokenizers.Digits(individual_digits=True)
        if pattern is None
        else pre_tokenizers.Split(Regex(pattern), "isolated")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*CORPUS, "  the clips 's\n\n the  clips!! 48 0.5\t7 "], trainer)
    return backend


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_tokenizer().backend_tokenizer,
    "chatml": lambda: chatml().backend_tokenizer,
    "llama": lambda: llama().backend_tokenizer,
    "digits": lambda: trained(None),
    "llama3": lambda: trained(_PATTERNS[0]),
    "qwen2": lambda: trained(_PATTERNS[1]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_to_encoding_whole_texts(name: str) -> None:
    backend = MAKERS[name]()
    table = word_table(backend)
    assert table is not None

    @settings(deadline=None, max_examples=150)
    @given(st.lists(TEXTS, max_size=4))
    def check(texts: list[str]) -> None:
        expected = [backend.encode(text, add_special_tokens=False).ids for text in texts]
        assert table.encode(texts) == expected

    check()


def test_a_real_tokenizer_on_real_text() -> None:
    need(ROOT / "models" / "smollm2")
    need(SHARED / "formats")
    backend = load_tokenizer(ROOT / "models" / "smollm2").backend_tokenizer
    table = word_table(backend)
    assert table is not None
    for name in ("hh_rlhf_harmless_500.jsonl", "messages_parts_tools_50.jsonl"):
        texts = (SHARED / "formats" / name).read_text("utf-8").split("\n")[:60]
        assert table.encode(texts) == [e.ids for e in backend.encode_batch(texts, add_special_tokens=False)]


def test_others_are_left_alone() -> None:
    assert word_table(spaced().backend_tokenizer) is None
    for change in ("normalizer", "stripping", "prefix", "pattern"):
        backend = trained("[a-z]+ " if change == "pattern" else None)
        if change == "normalizer":
            from tokenizers import normalizers

            backend.normalizer = normalizers.NFC()
        if change == "stripping":
            backend.add_special_tokens([AddedToken("<x>", lstrip=True)])
        if change == "prefix":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        assert word_table(backend) is None
