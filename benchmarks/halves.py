"""float32 convolutions whose products are made of halves, beside torch's: rounding errors and speed, layer by layer.

    python benchmarks/halves.py                  # VGG16 on 32×32, 1,100 samples, on a GPU
    python benchmarks/halves.py --tiles 128,128,64,8,3 128,64,64,4,4 --samples 2048

Errors are ‖found − exact‖ / ‖exact‖, where float64 is exact, on numbers as a network has them: inputs behind a ReLU,
gradients of which half are 0. Rates count a multiplication and an addition for each product, however it is made.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.fast import halves
from fedprophet.fast.tiles import Tiles
from fedprophet.precision import exact_products

LAYERS = [
    (64, 64, 32),
    (64, 128, 16),
    (128, 128, 16),
    (128, 256, 8),
    (256, 256, 8),
    (256, 512, 4),
    (512, 512, 4),
    (512, 512, 2),
]
"""Inputs, outputs and the sides of the images of VGG16's convolutions behind the first one."""


def seconds(work: Callable[[], object], repeat: int = 20) -> float:
    """Return how long work takes on the GPU, in the mean."""
    for _ in range(3):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / repeat


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def measured(shape: tuple[int, int, int], turned: bool, samples: int, tilings: Sequence[Tiles | None]) -> None:
    """Print a layer's errors and rates on its way forward or, `turned`, back."""
    inputs, outputs, side = shape
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, device="cuda").requires_grad_(False)
    weight = halves.HalvesConvolution(layer).weight
    image = torch.randn(samples, outputs if turned else inputs, side, side, device="cuda").relu_()
    image = image.contiguous(memory_format=torch.channels_last)
    flops = 2 * 9 * inputs * outputs * side * side * samples
    convolved = F.conv_transpose2d if turned else F.conv2d
    exact = convolved(image[:64].double(), layer.weight.double(), padding=1)

    def line(name: object, work: Callable[[], Tensor]) -> None:
        found, rate = error(work()[:64], exact), flops / seconds(work) / 1e12
        print(f"  {name!s:24s} error {found:.1e}  {rate:6.1f} TFLOP/s", flush=True)

    print(f"{inputs} to {outputs} channels, {side} × {side}, {'back' if turned else 'forward'}")
    with exact_products():
        line("torch", lambda: convolved(image, layer.weight, padding=1))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        line("torch, autotuned", lambda: convolved(image, layer.weight, padding=1))
    rows = image.permute(0, 2, 3, 1)
    for tiling in tilings:

        def work(tiling: Tiles | None = tiling) -> Tensor:
            return halves.convolve(halves.split(rows), weight, turned=turned, tiling=tiling)

        line(tiling or "halves", work)
    taken = seconds(lambda: halves.split(rows))
    print(f"  splitting takes {taken * 1e6:.0f} us of the time for {flops / 1e9:.0f} GFLOP", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1100)
    parser.add_argument("--layers", nargs="*", type=int, default=range(len(LAYERS)), help="which of the layers")
    parser.add_argument("--tiles", nargs="*", default=[], help="positions,outputs,inputs,warps,stages")
    asked = parser.parse_args()
    tilings = [tuple(map(int, text.split(","))) for text in asked.tiles] or [None]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.samples} samples")
    for number in asked.layers:
        for turned in (False, True):
            fitting = [tiling for tiling in tilings if tiling is None or LAYERS[number][not turned] % tiling[1] == 0]
            measured(LAYERS[number], turned, asked.samples, fitting)


if __name__ == "__main__":
    main()
