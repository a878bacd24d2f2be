"""What stacks read: images, labels and cached features of clients, which stay on the device while there is room."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedprophet.client.job import Job
from fedprophet.data.dataset import LocalExamples
from fedprophet.messages.tasks import Evaluate, ModelTask
from fedprophet.storage.bounded import BoundedCache

J = TypeVar("J", bound=Job[ModelTask])


class Inputs:
    """The inputs of clients on a device, fetched or made when a job needs them."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device = device
        # The newest stays however large it is.
        self._resident: BoundedCache[Hashable, Tensor] = BoundedCache(limit, lambda tensor: tensor.nbytes, least=1)

    @property
    def nbytes(self) -> int:
        """How many bytes stay."""
        return self._resident.size

    def features(self, jobs: Sequence[J], make: Callable[[Sequence[J]], Sequence[Tensor]]) -> list[Tensor]:
        """Return the features of the clients' training samples behind their frozen modules, which `make` computes."""
        keys = [("features", job.features_key) for job in jobs]
        # Those that are there are taken first: to make the others may drive them out.
        found = {key: kept for key in keys if (kept := self._resident.get(key)) is not None}
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in found}
        fresh = make(list(missing.values())) if missing else ()
        for key, features in zip(missing, fresh, strict=True):
            found[key] = self._resident.put(key, features)
        return [found[key] for key in keys]

    def images(self, job: Job[ModelTask]) -> Tensor:
        """Return the images that a client trains on."""
        return self._images(job, "train", job.client.data.train)

    def labels(self, job: Job[ModelTask]) -> Tensor:
        """Return the labels of these images."""
        return self._labels(job, "train", job.client.data.train)

    def held_out(self, job: Job[Evaluate]) -> tuple[Tensor, Tensor]:
        """Return the images and labels that an evaluation is about."""
        examples = job.client.data.validation
        images, labels = self._images(job, "validation", examples), self._labels(job, "validation", examples)
        if len(job.held_out) == len(examples):
            return images, labels
        positions = job.held_out.to(self._device)
        return images[positions], labels[positions]

    def _images(self, job: Job[ModelTask], part: str, examples: LocalExamples) -> Tensor:
        def fetch() -> Tensor:
            images = examples.fetch(torch.arange(len(examples))).to(self._device)
            return images.permute(0, 2, 3, 1).contiguous()

        return self._kept(("images", job.task.client, part), fetch)

    def _labels(self, job: Job[ModelTask], part: str, examples: LocalExamples) -> Tensor:
        return self._kept(("labels", job.task.client, part), lambda: examples.labels.to(self._device))

    def _kept(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        found = self._resident.get(key)
        return self._resident.put(key, make()) if found is None else found
