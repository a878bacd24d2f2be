"""What stacks read: images, labels and cached features of clients, which stay on the device while there is room."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from fedprophet.client.measure import drawn_samples
from fedprophet.data.dataset import LocalExamples
from fedprophet.engines.job import Job
from fedprophet.messages.modules import digest
from fedprophet.messages.task import ClientTask


class Resident:
    """Tensors that stay on the device, at most so many bytes; those not used for longest make room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that key, made now where it is not there."""
        found = self.find(key)
        return self.keep(key, make()) if found is None else found

    def find(self, key: Hashable) -> Tensor | None:
        """Return the tensor of that key, if it is there."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Take in a tensor under a new key, and return it; the newest stays, however large it is."""
        self._kept[key] = tensor
        self.nbytes += tensor.nbytes
        while self.nbytes > self._limit and len(self._kept) > 1:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return tensor


class Inputs:
    """The inputs of clients on a device, fetched or made when a job needs them."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device = device
        self._resident = Resident(limit)

    @property
    def nbytes(self) -> int:
        """How many bytes stay."""
        return self._resident.nbytes

    def read(self, jobs: Sequence[Job], make: Callable[[Sequence[Job]], Sequence[Tensor]]) -> list[Tensor]:
        """Return what atom `first` reads for every training sample: images, or features, which `make` makes."""
        if not jobs[0].task.frozen:
            return self.images(jobs)
        keys = [_features_key(job) for job in jobs]
        # Those that are there are taken first: to make the others may drive them out.
        found = {key: kept for key in keys if (kept := self._resident.find(key)) is not None}
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in found}
        fresh = make(list(missing.values())) if missing else ()
        for key, features in zip(missing, fresh, strict=True):
            found[key] = self._resident.keep(key, features)
        return [found[key] for key in keys]

    def images(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Return the clients' training images."""
        return [self._images(job, "train", job.client.data.train) for job in jobs]

    def labels(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Return the labels of the training samples."""
        return [self._labels(job, "train", job.client.data.train) for job in jobs]

    def held_out(self, job: Job) -> tuple[Tensor, Tensor]:
        """Return the images and labels that an evaluation is about."""
        examples = job.client.data.validation
        images, labels = self._images(job, "validation", examples), self._labels(job, "validation", examples)
        chosen = evaluated_positions(job.task, len(examples))
        if len(chosen) == len(examples):
            return images, labels
        positions = chosen.to(self._device)
        return images[positions], labels[positions]

    def _images(self, job: Job, part: str, examples: LocalExamples) -> Tensor:
        def fetch() -> Tensor:
            images = examples.fetch(torch.arange(len(examples))).to(self._device)
            return images.permute(0, 2, 3, 1).contiguous()

        return self._resident.get(("images", job.task.client, part), fetch)

    def _labels(self, job: Job, part: str, examples: LocalExamples) -> Tensor:
        key = ("labels", job.task.client, part)
        return self._resident.get(key, lambda: examples.labels.to(self._device))


def _features_key(job: Job) -> Hashable:
    """Return what cached features depend on: the client, the frozen modules, and its own layers in them."""
    before = job.workspace.chain.local(0, job.task.first)
    own = digest({name: job.own[name] for name in before if name in job.own})
    return "features", job.task.client, tuple(module.digest for module in job.task.frozen), own


def evaluated_positions(task: ClientTask, available: int) -> Tensor:
    """Return which held-out samples an evaluation is about."""
    chosen = drawn_samples(task, available)
    first, last = task.part or (0, len(chosen))
    return chosen[first:last]
