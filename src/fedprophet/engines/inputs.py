"""What stacks read: images, labels and cached features of clients, which stay on the device while there is room."""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fedprophet.client.job import Job
from fedprophet.data.augmented import shifted
from fedprophet.data.examples import Examples
from fedprophet.messages.tasks import Evaluate, ModelTask
from fedprophet.storage.bounded import BoundedCache

J = TypeVar("J", bound=Job[ModelTask])
Split = Literal["train", "validation"]


class Inputs:
    """The inputs of clients on a device, fetched or made when a job needs them."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device = device
        # The newest stays however large it is.
        self.resident: BoundedCache[Hashable, Tensor] = BoundedCache(limit, lambda tensor: tensor.nbytes, least=1)

    def features(self, jobs: Sequence[J], make: Callable[[Sequence[J]], Sequence[Tensor]]) -> list[Tensor]:
        """Return the features of the clients' training samples behind their frozen modules, which `make` computes.

        Those of moved images are of this round alone, and are not kept.
        """
        if jobs[0].offsets is not None:
            return list(make(jobs))
        keys = [("features", job.features_key) for job in jobs]
        # Those that are there are taken first: to make the others may drive them out.
        found = {key: there for key in keys if (there := self.resident.get(key)) is not None}
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in found}
        fresh = make(list(missing.values())) if missing else ()
        for key, features in zip(missing, fresh, strict=True):
            found[key] = self.resident.put(key, features)
        return [found[key] for key in keys]

    def images(self, job: Job[ModelTask], split: Split = "train") -> Tensor:
        """Return the images of one split of a client's data; those to train on where the task moves them."""
        examples: Examples = getattr(job.client.data, split)

        def fetch() -> Tensor:
            images = examples.fetch(torch.arange(len(examples))).to(self._device)
            return images.permute(0, 2, 3, 1).contiguous()

        images = self._get(("images", job.task.client, split), fetch)
        if split != "train" or job.offsets is None:
            return images
        return shifted(images.permute(0, 3, 1, 2), job.offsets).permute(0, 2, 3, 1).contiguous()

    def labels(self, job: Job[ModelTask], split: Split = "train") -> Tensor:
        """Return the labels of these images."""
        examples: Examples = getattr(job.client.data, split)
        return self._get(("labels", job.task.client, split), lambda: examples.labels.to(self._device))

    def held_out(self, job: Job[Evaluate]) -> tuple[Tensor, Tensor]:
        """Return the images and labels that an evaluation is about."""
        images, labels = self.images(job, "validation"), self.labels(job, "validation")
        if len(job.held_out) == len(images):
            return images, labels
        positions = job.held_out.to(self._device)
        return images[positions], labels[positions]

    def _get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        found = self.resident.get(key)
        return self.resident.put(key, make()) if found is None else found
