"""What a linear layer multiplies with: a tensor, or a matrix that is kept in another form.

Layer: model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from torch import Tensor


class StoredMatrix(ABC):
    """A matrix ``[out, in]`` that knows how to multiply."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that it takes."""

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Computes ``x @ self.T``.

        Args:
            x: ``[num_rows, in]``, contiguous.

        Returns:
            ``[num_rows, out]`` of the same type, contiguous.
        """


Matrix: TypeAlias = Tensor | StoredMatrix
"""What a linear layer multiplies with."""
