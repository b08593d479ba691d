"""Memory of the host that a GPU copies to and from at full speed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL = 1 << 20  # bytes; not worth pinning
log = logging.getLogger("posttune.memory")


def host_empty(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A tensor on the CPU, its pages locked where it is to be pinned and large enough to matter.

    Of exactly its size: torch's own allocator of pinned memory rounds up to a power of two.
    """
    made = torch.empty(tuple(shape), dtype=dtype)
    if pinned and made.nbytes >= _SMALL:
        _lock(made)
    return made


def _lock(tensor: Tensor) -> None:
    """Touch every page, by all threads, then lock them: faster than to have them locked untouched."""
    tensor.view(torch.uint8).zero_() if tensor.is_contiguous() else tensor.zero_()
    address, driver = tensor.data_ptr(), torch.cuda.cudart()
    if int(driver.cudaHostRegister(address, tensor.nbytes, 0)):
        log.warning("%d MiB of the host's memory could not be pinned: copies are slower", tensor.nbytes >> 20)
        return
    weakref.finalize(tensor, driver.cudaHostUnregister, address)
