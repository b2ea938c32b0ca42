"""Counts the bytes of tensors that are alive, as a GPU's allocator does and a CPU's does not."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Of what is made inside: `live()` bytes now, and the most after any operator, `peak`; its inside is not seen."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0
        """Bytes of `_storages`, which may hold some that are gone."""
        self._given: set[int] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = [x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._given.update(storage for storage in known if storage not in self._storages)
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        if self._at_most > self.peak:
            self.peak = max(self.peak, self.live())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # not used again while there is a weak reference
        if key not in self._given and key not in self._storages:
            self._storages[key] = (StorageWeakRef(storage), storage.nbytes())
            self._at_most += storage.nbytes()

    def live(self) -> int:
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        self._at_most = sum(size for _, size in self._storages.values())
        return self._at_most
