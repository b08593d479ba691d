"""Tiny random models on disk, for tests and examples."""

from __future__ import annotations

from pathlib import Path


def tiny_model(
    folder: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
    vocab: int | None = None,
    tie: bool = False,
    model_type: str = "llama",
) -> Path:
    """Write a Hugging Face folder (random weights, tokenizer, generation config) and return its path.

    ``tokenizer`` is ``"bytes"`` or a folder; ``vocab`` defaults to its size. The head's size of 32 is
    what vLLM can serve on a CPU. Imports torch.
    """
    from posttune.models.hf_folder import without_progress
    from posttune.models.load import new_model
    from posttune.models.tokenizer import load_tokenizer, save_tokenizer

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = load_tokenizer(tokenizer)
    fields = {
        "model_type": model_type,
        "vocab_size": vocab or len(words),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tie,
    }
    with without_progress():
        new_model(fields, words, seed=seed).save_pretrained(folder)
    save_tokenizer(words, folder)
    return folder
