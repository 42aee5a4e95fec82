"""How sparse tensors are pickled: by their parts, which are dense tensors.

torch's own way keeps every tensor that it rebuilds in a list until the next ``torch.load``, and with it its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def rebuild_coo(
    indices: torch.Tensor, values: torch.Tensor, size: torch.Size, is_coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    """Return the sparse tensor of these parts, which are not copied, nor checked: they come from a tensor."""
    made = torch.sparse_coo_tensor(indices, values, size, check_invariants=False, is_coalesced=is_coalesced)
    return made.requires_grad_(requires_grad)


def rebuild_compressed(
    layout: torch.layout,
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    size: torch.Size,
    requires_grad: bool,
) -> torch.Tensor:
    """As ``rebuild_coo``, for the layouts of compressed rows or columns."""
    made = torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=False)
    return made.requires_grad_(requires_grad)


def reduce_sparse(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]] | None:
    """Return what pickle makes of a sparse tensor, by the protocol of ``__reduce__``; None if it is not sparse."""
    layout = tensor.layout
    if layout is torch.strided or layout is torch.jagged:
        return None
    whole, size, requires_grad = tensor.detach(), tensor.size(), tensor.requires_grad
    if layout is torch.sparse_coo:
        return rebuild_coo, (whole._indices(), whole._values(), size, whole.is_coalesced(), requires_grad)
    if layout in _BY_ROWS:
        parts = whole.crow_indices(), whole.col_indices()
    elif layout in _BY_COLUMNS:
        parts = whole.ccol_indices(), whole.row_indices()
    else:
        return None
    return rebuild_compressed, (layout, *parts, whole.values(), size, requires_grad)
