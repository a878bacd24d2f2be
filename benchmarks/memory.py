"""The price of a memory budget: modules that keep within it by a plan, beside a whole model that is swapped to disk.

    python benchmarks/memory.py                             # VGG16 and ResNet34, in benchmarks/results/memory.{json,md}
    python benchmarks/memory.py --models vgg16 --budgets 60 --repeat 1
    python benchmarks/memory.py --device cuda --out benchmarks/results/memory-h200

For each budget the model is cut by the paper's Algorithm 1, and modules that fit no exact plan are cut further. Each
module has the cheapest plan that fits; its iteration (PGD-10, then a step) is timed plain and planned. An attack's
steps cost the same, so that on a CPU two of them are timed and counted five times. Computation is processor time, since
the machine may have other work; on a GPU it is wall time, plain iterations come first but for modules that trials cut
further (convolutions remember what they did under a limit), and plans run as limited as a training by them.

Both begin at the same parameters and draws once more: the difference of their updates, as vectors, by the length of the
plain one is what a plan changes. On a GPU torch's own convolutions compute these updates, without cuDNN and TF32, which
round otherwise for other sizes of batch. Steps of an attack multiply what rounding changes, by turning signs of
gradients that are next to nothing; so the same is done in float64, where rounding is next to nothing too.

Beside it is what the paper's jFAT does on paper: the whole model in the same budget, with what does not fit on disk.
Activations go to a file by torch's saved-tensor hooks and come back for the backward pass, as many of them as must.
Where parameters, gradients and momenta do not fit either, as many bytes of them are read and written whenever a real
swap would have to; the computation then uses the copy that the process still has. The file is opened with O_DIRECT: the
page cache of this machine has no part in it (that of a host below a virtual machine may). Swapping is wall time. What
is then left in memory is what one layer takes while it runs, which may still be more than the budget. On a GPU
activations pass through the CPU's memory, and workspaces are what cuDNN likes best.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from memory_price.models import SETTINGS, measured
from memory_price.pages import known, page, together

from fedprophet.cascade.allocator import spare_memory
from fedprophet.display.tables import markdown
from fedprophet.machine import describe
from fedprophet.threads import torch_threads

RESULTS = Path(__file__).parent / "results" / "memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--budgets", nargs="+", type=int, help="in MB, instead of the models' own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--no-swap", action="store_true", help="leave the swapped model as it was measured before")
    parser.add_argument("--out", type=Path, default=RESULTS, help="two files, .json and .md")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if device.type == "cuda":
        spare_memory()
    path = chosen.out.with_suffix(".json")
    document = {
        "machine": describe(),
        "device": chosen.device,
        "models": known(path),
    }
    with torch_threads(1), TemporaryDirectory() as folder:
        for name in chosen.models:
            budgets = chosen.budgets or SETTINGS[name].budgets[device.type]
            before = document["models"].get(name, {}).get("budgets", [])
            swap = None if chosen.no_swap else Path(folder)
            for found in measured(name, budgets, device, chosen.repeat, swap):
                document["models"][name] = {**found, "budgets": together(before, found["budgets"])}
                path.write_text(json.dumps(document, indent=1) + "\n")
                chosen.out.with_suffix(".md").write_text(markdown(page(document)))


if __name__ == "__main__":
    main()
