"""What an export holds in memory at most, of a model with a large tied embedding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path

import torch

from posttune.checkpoint._export import export_model
from posttune.checkpoint.sources import open_source
from posttune.config.models import LoraConfig, ModelConfig
from posttune.models.load import load_model, new_model
from posttune.models.tokenizer import byte_tokenizer, save_tokenizer

torch.set_num_threads(1)
root, what = Path(sys.argv[1]), sys.argv[2]


def peak():
    # Not ru_maxrss: a new process inherits that of the large one that starts it.
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [each for each in status if each.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


if what == "make":
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 200_000, "tie_word_embeddings": True}
    model = new_model({"model_type": "llama", **sizes}, tokenizer, seed=0)
    model.save_pretrained(root / "model")
    save_tokenizer(tokenizer, root / "model")
else:
    save_tokenizer(byte_tokenizer(), root / "warm")  # what is imported late counts as before
    before = peak()
    if what == "load":
        load_model(ModelConfig(), root / "model", seed=0)
    else:
        export_model(open_source(root / "model"), root / "out")
    weights = sum(path.stat().st_size for path in (root / "model").glob("*.safetensors"))
    print(json.dumps((peak() - before) / weights))
"""


def measured(folder: Path, what: str) -> float:
    """The growth of the process's peak, as a multiple of the weights."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), what], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout or "0"))


@pytest.mark.slow
def test_an_export_holds_the_weights_a_few_times_at_most(tmp_path: Path) -> None:
    measured(tmp_path, "make")
    assert measured(tmp_path, "load") < 1.5  # the file is mapped
    # The source, what was written from it, and the pages of the file: 2.6 when this was written.
    assert 0.9 < measured(tmp_path, "export") < 3.5
