"""A process that trains one module of VGG16 within a real limit: what it has when it is ready, and the budget.

    python limited.py planned|plain BUDGET

It prints one line of JSON when it is through. With `plain` it trains without a plan, under the same limit.
"""

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.heads import build_head
from fedprophet.cascade.partition import partition
from fedprophet.client.features import FeatureCache
from fedprophet.client.job import Client
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import run_client
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining, Resources
from fedprophet.models import build
from fedprophet.storage.mapped import copied_to_file
from fedprophet.threat import input_threat

BATCH, ITERATIONS = 64, 2


def data_bytes() -> int:
    """Return the private memory that this process may write to (what RLIMIT_DATA counts)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


def ready(budget: int) -> tuple[Train, Client, Workspace]:
    """Return the training of the first module, its client, and a workspace that has nothing in memory."""
    torch.manual_seed(0)
    shape, classes = (3, 32, 32), 10
    chain = chain_of(build("vgg16", shape, classes))
    cost = cost_of(chain, shape, BATCH, classes)
    module = partition(cost, budget)[0]
    head = build_head(cost.atoms[module.last - 1].output[1:], classes)
    workspace = Workspace(
        chain,
        shape,
        classes,
        ModuleStore(copied_to_file),
        ClientStore(None, 10**6),
        FeatureCache(10**9, 0),
        frugal=True,
    )
    workspace.move_to_files()
    parameters = {name: chain.tensors[name].detach().clone() for name in chain.shared(module.first, module.last)}
    parameters |= {f"heads/0.{name}": value.detach() for name, value in head.named_parameters()}
    task = Train(
        round=1,
        client=0,
        seed=0,
        first=module.first,
        last=module.last,
        head=0,
        parameters=parameters,
        training=LocalTraining(ITERATIONS, BATCH, 0.01, 0.9, 1e-4, 1e-5),
        threat=input_threat(8 / 255, 2 / 255, 2),
        memory=budget,
    )
    images = (torch.rand(4 * BATCH, *shape) * 255).to(torch.uint8)
    examples = TensorExamples(images, torch.arange(4 * BATCH) % classes)
    data = ClientData(LocalExamples(examples, np.arange(4 * BATCH)), LocalExamples(examples, np.arange(0)))
    return task, Client(data, lambda _: Resources(budget, 1.0, 1.0)), workspace


def main(way: str, budget: int) -> None:
    torch.set_num_threads(1)
    task, client, workspace = ready(budget)
    # Two samples went through everything: libraries are loaded, and what they keep is there.
    run_client(replace(task, memory=10**10, training=replace(task.training, batch=2)), client, workspace)
    if way == "plain":
        task = replace(task, memory=0)
    before = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + budget, before + budget))
    answer = run_client(task, client, workspace)
    print(json.dumps({"idle": before, "plan": answer.plan, "peak": answer.peak, "loss": answer.loss}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
