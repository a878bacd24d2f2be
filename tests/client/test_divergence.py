"""A client whose training leaves the range of floating point: what it sends, what it keeps."""

import math

import numpy as np
import torch
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData, LocalExamples, TensorExamples
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.task import ClientTask, LocalTraining, Resources
from fedprophet.server.aggregate import fault


def test_norm_statistics_that_overflow_make_the_update_unusable():
    """A feature of 10^25 has an infinite variance, by which it is normalised to zero: loss and weights look healthy."""
    chain = explicit_chain(
        [("one", nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)))]
    )
    layers = ClientStore(None, 10**6)
    workspace = Workspace(chain, (1, 2, 2), 3, ModuleStore(), layers, FeatureCache(10**6, 10**6))
    with torch.no_grad():
        chain.tensors["one.0.weight"].fill_(1e25)
    parameters = {name: chain.tensors[name].detach().clone() for name in chain.shared()}
    torch.manual_seed(0)
    examples = TensorExamples(torch.rand(8, 1, 2, 2), torch.arange(8) % 3)
    data = ClientData(LocalExamples(examples, np.arange(6)), LocalExamples(examples, np.arange(6, 8)))
    training = LocalTraining(1, 6, learning_rate=0.1, momentum=0.0, weight_decay=0.0, strong_convexity=0.0)
    task = ClientTask("train", 1, 0, 0, last=1, training=training, parameters=parameters)
    update = run_client(task, Client(data, lambda _: Resources(1, 1.0, 1.0)), workspace)
    assert all(bool(torch.isfinite(value).all()) for value in update.parameters.values())
    assert math.isinf(float(chain.tensors["one.1.running_var"].max()))
    assert fault(task, update) == "its loss is nan"
    assert layers.get("backbone", 0, task.timeline, before=2) is None


def test_a_full_disk_costs_the_feature_cache_nothing_but_time(monkeypatch):
    cache, calls = FeatureCache(memory_limit=80, disk_limit=800), []

    def full(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    for key in (0, 1, 2, 0):
        found = cache.get(key, lambda key=key: calls.append(key) or torch.full((10,), float(key)))
        assert found[0] == key
    assert calls == [0, 1, 2, 0]
    assert cache.disk_bytes == 0
    assert not any(cache._folder.iterdir()), "half a file stays"
    folder = cache._folder
    cache.clear()
    assert not folder.exists()
