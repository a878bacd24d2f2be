"""Cut a model of your own into modules that each train in a third of the memory that the whole model takes."""

from torch import Tensor, nn

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.partition import partition


class Net(nn.Module):
    """Any PyTorch code: nothing in it knows about modules or budgets."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, stride=4)
        self.mixers = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(6))
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).relu()
        for mixer, norm in zip(self.mixers, self.norms, strict=True):
            x = x + norm(mixer(x)).relu()
        return self.classifier(x.mean((2, 3)))


cost = cost_of(chain_of(Net()), input_shape=(3, 32, 32), batch=64, classes=10)
print(f"whole model: {cost.total_memory / 1e6:.2f} MB, {cost.total_parameters} parameters")
for module in partition(cost, budget=cost.total_memory // 3):
    atoms = cost.atoms[module.first : module.last]
    layers = ", ".join(layer for atom in atoms for layer in atom.layers)
    print(f"module {module.index + 1}: {module.memory / 1e6:.2f} MB, {module.flops / 1e6:.0f} MFLOPs: {layers}")
