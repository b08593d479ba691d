"""A Hugging Face folder with random weights, made on a GPU where there is one: for speed and memory.

    python benchmarks/random_model.py models/qwen2.5-7b
    python benchmarks/random_model.py models/tiny --shape tiny

``qwen2.5-7b`` has the shape of Qwen2.5-7B (7,615,616,512 parameters, 15.2 GB in bfloat16). The tokenizer
has a token for each byte.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from posttune.models.tokenizer import byte_tokenizer, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


def make(folder: Path, shape: str, dtype: torch.dtype) -> int:
    """Write the folder; returns the number of parameters."""
    tokenizer = byte_tokenizer()
    fields = dict(SHAPES[shape])
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, **ids)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(**ids)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="4GB")
    save_tokenizer(tokenizer, folder)
    return sum(param.numel() for param in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    began = time.perf_counter()
    count = make(options.folder, options.shape, getattr(torch, options.dtype))
    print(f"{options.folder}: {count:,} parameters in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
