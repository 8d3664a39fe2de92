"""Masks of packed documents in transformers models, in a form whose dependence on positions is a formula.

Transformers compares the positions of rows and keys in their documents. Where both are in the same document, which the
mask demands as well, the position of a key is that of the row, and the distance between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

_NAME = "remap_positions_for_packed_sequence"


def documents_by_distance() -> AbstractContextManager[Any]:
    """Within the context, masks of packed documents are functions of a row's position and of distances to keys."""
    masks = sys.modules.get("transformers.masking_utils")
    return patch.object(masks, _NAME, _remapped) if hasattr(masks, _NAME) else nullcontext()


def _remapped(mask: Callable[..., Any], positions: torch.Tensor) -> Callable[..., Any]:
    def inner(batch: Any, head: Any, row: Any, key: Any) -> Any:
        position = positions[batch, row]
        # In this order, no constant has a number for each row and key.
        return mask(batch, head, position, position + key - row)

    return inner
