"""What a call moves between HBM and the chip: elements by pass, matrix and direction, and their sums."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

READ, WRITE = "read", "write"
DIRECTIONS = (READ, WRITE)


@dataclass(frozen=True)
class Transfer:
    """One matrix in one direction in one pass over memory."""

    pass_name: str
    """A kernel, or an operator of PyTorch, in words."""
    matrix: str
    direction: str
    elements: int
    element_bytes: int

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes


def total_elements(transfers: Iterable[Transfer]) -> int:
    return sum(one.elements for one in transfers)


def total_bytes(transfers: Iterable[Transfer]) -> int:
    return sum(one.bytes for one in transfers)


def elements_by_matrix(transfers: Iterable[Transfer]) -> Counter[tuple[str, str]]:
    """(matrix, direction) -> elements; what is not moved is not there."""
    return _summed(((one.matrix, one.direction), one.elements) for one in transfers)


def bytes_by_matrix(transfers: Iterable[Transfer]) -> Counter[tuple[str, str]]:
    """(matrix, direction) -> bytes; what is not moved is not there."""
    return _summed(((one.matrix, one.direction), one.bytes) for one in transfers)


def elements_by_pass(transfers: Iterable[Transfer]) -> Counter[tuple[str, str, str]]:
    """(pass, matrix, direction) -> elements; what is not moved is not there."""
    return _summed(((one.pass_name, one.matrix, one.direction), one.elements) for one in transfers)


def _summed(items: Iterable[tuple[tuple, int]]) -> Counter:
    sums: Counter = Counter()
    for key, count in items:
        if count:
            sums[key] += count
    return sums
