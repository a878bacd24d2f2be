"""Train a model and a dataset of your own robustly, on clients with 60 % of the memory that training it takes."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedprophet


class Net(nn.Module):
    """Any plain PyTorch model: it is cut into modules as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Conv2d(8, 32, 3, stride=2, padding=1)
        self.late = nn.Conv2d(32, 32, 3, padding=1)
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(self.middle(x))
        x = torch.relu(self.late(x) + x)
        return self.classifier(x.mean(dim=(2, 3)))


images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(labels)
data = fedprophet.from_tensors(images[:1500], labels[:1500], images[1500:], labels[1500:])

small = {"rounds": 4, "train": {"iterations": 4, "learning_rate": 0.05}, "memory": {"budget": "60%"}}
run = fedprophet.train(small | {"attack": {"radius": 0.1, "steps": 4}}, model=Net(), data=data)

for module in run.results["modules"]:
    print(f"module {module['index']}: {', '.join(module['atoms'])}: {module['memory_bytes']:,} bytes")
for kind in ("personalised", "global"):
    print(kind, {attack: round(value["accuracy"], 3) for attack, value in run.results[kind].items()})
print("files:", run.path)
