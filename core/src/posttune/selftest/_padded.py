"""Between the padded rectangles of gold cases and packed tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from posttune.selftest._case import Inputs
from posttune.selftest.gold import Got
from posttune.types import Packed, Totals


class Padded:
    """A rectangle [B, T] whose rows become packed sequences; what follows a row's last token is cut off."""

    def __init__(self, mask: Tensor, groups: Sequence[Hashable]) -> None:
        self.mask = mask > 0  # [B, T]
        place = torch.arange(1, self.mask.shape[1] + 1)
        self.lengths = torch.where(self.mask, place, 0).amax(1)  # [B]
        self.kept = place[None] <= self.lengths[:, None]
        ends = self.lengths.cumsum(0)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int()
        self.packed = Packed(cu_seqlens, self.mask[self.kept], tuple(groups))

    @classmethod
    def of(cls, inputs: Inputs, like: str) -> Padded:
        """From the input ``mask``, or all ones in the shape of another input."""
        mask = inputs.tensor("mask") if "mask" in inputs else torch.ones_like(inputs.tensor(like))
        if mask.dim() != 2 or not mask.numel():
            raise inputs.fault("input 'mask' must be rows of numbers")
        return cls(mask, inputs.groups(len(mask)))

    def pack(self, inputs: Inputs, name: str) -> Tensor:
        """An input [B, T], or one value a row [B], as [N]."""
        return self.packing(inputs, name, inputs.tensor(name))

    def packing(self, inputs: Inputs, name: str, values: Tensor) -> Tensor:
        """As ``pack``, for a tensor that the caller needs the gradient by."""
        wide = values[:, None].expand(len(values), self.mask.shape[1]) if values.dim() == 1 else values
        if wide.shape != self.mask.shape:
            raise inputs.fault(
                f"input {name!r} has shape {list(values.shape)}, the mask {list(self.mask.shape)}"
            )
        return wide[self.kept]

    def at_end(self, values: Tensor) -> Tensor:
        """One value a row, placed at its last token: [N]."""
        last = self.packed.cu_seqlens[1:].long()[self.lengths > 0] - 1
        return values.new_zeros(len(self.packed.mask)).index_put((last,), values[self.lengths > 0])

    def got(self, values: Tensor) -> Got:
        """[N] back to rows, compared where the mask is 1."""
        wide = values.new_zeros(self.mask.shape).masked_scatter(self.kept, values)
        return Got(wide.tolist(), self.mask.tolist())

    def totals(self, *, all_rows: bool = False) -> Totals:
        """Counts; ``all_rows``: rows without tokens are sequences too. The length is that of the padding."""
        counts = self.mask.sum(1)
        sequences = len(counts) if all_rows else int((counts > 0).sum())
        return Totals(int(counts.sum()), sequences, self.mask.shape[1])
