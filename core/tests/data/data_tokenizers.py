"""Tokenizers of several families, made on the spot."""

from __future__ import annotations

from functools import lru_cache

from posttune.models.tokenizer import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As the templates of reasoning models do: what was thought is shown in the last turn only.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
CORPUS = ["Natalia sold clips to 48 of her friends in April, and then half as many in May."] * 3


def chatml(eos: str = "<|im_end|>", template: str = CHATML) -> PreTrainedTokenizerFast:
    """Bytes with ChatML's marks; pad is the EOS, as in many released models."""
    tokenizer = byte_tokenizer()
    marks = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.eos_token = eos
    tokenizer.pad_token = eos
    tokenizer.chat_template = template
    return tokenizer


@lru_cache
def _byte_level() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return str(backend.to_str())


def llama(template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts a BOS before every text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level()),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


@lru_cache
def _spaced() -> str:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [chr(code) for code in range(32, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return str(backend.to_str())


def spaced() -> PreTrainedTokenizerFast:
    """Like SentencePiece: a space goes before every text, so that parts do not simply join."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_spaced()), bos_token="<s>", eos_token="</s>"
    )
