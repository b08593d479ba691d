"""The state of the random number generators, as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch


def capture() -> dict[str, torch.Tensor]:
    """The state of Python's, numpy's, torch's and the current accelerator's generator, by name."""
    _, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([numpy_state["state"]["pos"], numpy_state["has_gauss"]]),
        "numpy_gauss": torch.tensor(numpy_state["gauss"], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `capture`. An accelerator's state is left alone where there is none to set."""
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    words = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
