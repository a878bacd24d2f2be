"""Starting weights: a safetensors file with torchvision's parameter names, or the weights torchvision publishes."""

import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedprophet.data.fetch import Remote, alone, cache_home, fetch
from fedprophet.errors import ModelError
from fedprophet.models.normalize import Normalize
from fedprophet.models.vgg import VGG
from fedprophet.storage.files import tensors_to_bytes, write_atomic

IMAGENET = "imagenet"
"""The source that stands for the published weights of the architecture."""
ADDRESS = "https://download.pytorch.org/models/"
PUBLISHED: Mapping[str, str] = {
    "vgg11": "vgg11_bn-6002323d.pth",
    "vgg13": "vgg13_bn-abd245e5.pth",
    "vgg16": "vgg16_bn-6c64b313.pth",
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "vit": "vit_b_16-c867db91.pth",
}
"""The files of torchvision; behind the dash is the beginning of the file's SHA-256."""
NORMALIZATION = "mean .485 .456 .406 std .229 .224 .225"
"""What the published weights expect of their input."""
_NUMBERS = r"((?:\s+[0-9]*\.?[0-9]+)+)"
_NORMALIZATION = re.compile(rf"mean{_NUMBERS}\s+std{_NUMBERS}")
CLASSIFIERS = ("classifier", "fc", "heads")
"""What torchvision calls the part that depends on the number of classes."""
_COUNTER = "num_batches_tracked"
"""Counts batches and changes nothing: a file may leave it out."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LoadReport:
    """What became of a weights file: names as in the model, but `unused` as in the file.

    `missing` keeps its initial values. `moved` has the tensors that were found under another name, which is how a
    smaller VGG starts from a larger one. `digest` identifies the file, `metadata` is what it says of itself.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    moved: Mapping[str, str]
    digest: str
    metadata: Mapping[str, str]

    @property
    def normalization(self) -> Normalize | None:
        """How the weights expect their input to be normalised, where the file says so."""
        match = _NORMALIZATION.fullmatch(self.metadata.get("normalisation", ""))
        if match is None:
            return None
        mean, std = ([float(number) for number in part.split()] for part in match.groups())
        return Normalize(mean, std)

    def summary(self) -> str:
        """Return the report in one line."""
        text = f"weights from {self.source}: {len(self.loaded)} tensors loaded ({_parts(self.loaded)})"
        if self.moved:
            text += ", by block and position, since the file is of another VGG"
        text += f"; initialised: {_parts(self.missing)}" if self.missing else "; nothing left to initialise"
        text += f"; not used: {_parts(self.unused)}" if self.unused else ""
        return text + ("; inputs are normalised as the file says" if self.normalization else "")


def load_weights(model: nn.Module, source: str | Path, architecture: str | None = None) -> LoadReport:
    """Load starting weights into a model and say what was found; the model is untouched where that is an error.

    `source` is a safetensors file, or `imagenet` for the published weights of `architecture`, a name of the registry.
    """
    path = published_weights(architecture) if source == IMAGENET else Path(source).expanduser()
    try:
        with safe_open(path, framework="pt") as file:
            stored_names = file.keys()
            # torchvision, too, translates the names of the published transformer when it loads it.
            names = {
                n.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3."): n for n in stored_names
            }
            shapes = {name: tuple(file.get_slice(stored).get_shape()) for name, stored in names.items()}
            plan = _plan(model, shapes, str(source))
            values = {name: file.get_tensor(names[found]) for name, found in plan.items()}
            metadata = dict(file.metadata() or {})
    except FileNotFoundError:
        raise ModelError(f"there is no weights file {path}. {_ALLOWED}") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}. {_ALLOWED}") from error
    _copy(model, values, str(source))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    used = set(plan.values())
    return LoadReport(
        source=str(source),
        loaded=tuple(plan),
        missing=tuple(n for n in model.state_dict() if n not in plan and not n.endswith(_COUNTER)),
        unused=tuple(stored for name, stored in names.items() if name not in used),
        moved={name: found for name, found in plan.items() if name != found},
        digest=digest,
        metadata=metadata,
    )


def published_weights(architecture: str | None) -> Path:
    """Return the published weights of an architecture as a safetensors file in the user's cache, fetched if need be."""
    if architecture is None or architecture not in PUBLISHED:
        raise ModelError(
            f"no {IMAGENET} weights are published for {architecture or 'a model of your own'}, "
            f"only for {', '.join(PUBLISHED)}. {_ALLOWED}"
        )
    folder = cache_home() / "weights"
    name = PUBLISHED[architecture]
    converted = folder / f"{Path(name).stem}.safetensors"
    if converted.exists():
        return converted
    remote = Remote(ADDRESS + name, "sha256", Path(name).stem.rpartition("-")[2])
    otherwise = f"Without a network: put {name} in {folder}, or give a safetensors file as model.weights"
    downloaded = fetch(remote, folder, otherwise)
    with alone(folder):
        if not converted.exists():
            _convert(downloaded, converted, remote)
        downloaded.unlink(missing_ok=True)
    return converted


_ALLOWED = f'Give a safetensors file with torchvision\'s parameter names, or "{IMAGENET}"'


def _convert(downloaded: Path, converted: Path, remote: Remote) -> None:
    """Turn torchvision's file into safetensors: the only place where a pickle is opened, and only for tensors."""
    try:
        tensors = torch.load(downloaded, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ModelError(f"{downloaded} is not a file of tensors alone. Delete it and try again") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ModelError(f"{downloaded} is not a table of tensors. Delete it and try again")
    metadata = {"source": remote.url, remote.algorithm: remote.digest, "normalisation": NORMALIZATION}
    write_atomic(converted, tensors_to_bytes(tensors, metadata))


def _plan(model: nn.Module, shapes: Mapping[str, Shape], source: str) -> dict[str, str]:
    """Return which tensor of the file each tensor of the model is loaded from."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    positions = _by_position(wanted, shapes) if isinstance(model, VGG) else None
    places = {name: (positions or {}).get(name, name) for name in wanted}
    if positions is not None:  # the file's `features.10` need not be ours
        places = {name: found for name, found in places.items() if name in positions or not _is_feature(name)}
    unfit = {name for name, found in places.items() if found in shapes and shapes[found] != wanted[name]}
    # A layer is loaded as a whole or not at all.
    spoilt = {name.rpartition(".")[0] for name in unfit}
    plan = {n: found for n, found in places.items() if found in shapes and n.rpartition(".")[0] not in spoilt}
    nothing = all(name.endswith(_COUNTER) for name in plan)
    for name in sorted(unfit):
        # Another VGG may differ in some layers, but one that differs in all has another width.
        if name.partition(".")[0] not in CLASSIFIERS and (positions is None or nothing):
            raise ModelError(
                f"tensor {name} has shape {_shown(shapes[places[name]])} in {source} but {_shown(wanted[name])} in the "
                "model: the weights are of another architecture or width, or for images of another size"
            )
    if nothing:
        raise ModelError(
            f"{source} has nothing in common with the model: it holds {_first(shapes)}, and the model {_first(wanted)}"
        )
    return plan


def _by_position(wanted: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> dict[str, str] | None:
    """Return where a VGG's features lie in the file of another VGG; None where both have the same layers."""
    ours, theirs = _convolutions(wanted), _convolutions(shapes)
    if not theirs or ours == theirs:
        return None
    places = {index + offset: place for place, index in ours.items() for offset in (0, 1)}  # with its batch norm
    found = {}
    for name in filter(_is_feature, wanted):
        _, layer, tensor = name.split(".", 2)
        place = places[int(layer)]
        if place in theirs:
            found[name] = f"features.{theirs[place] + int(layer) - ours[place]}.{tensor}"
    return found


def _convolutions(shapes: Mapping[str, Shape]) -> dict[tuple[int, int], int]:
    """Return the index of each convolution of a VGG's `features` by its block and its position in it.

    A block ends with a pool, which has no tensors: it shows as a wider gap to the next convolution.
    """
    layers = {name.split(".")[1] for name, shape in shapes.items() if _is_feature(name) and len(shape) == 4}
    indices = sorted(int(layer) for layer in layers if layer.isdecimal())
    usual = 3 if indices and f"features.{indices[0] + 1}.weight" in shapes else 2  # with batch norm, or without
    places: dict[tuple[int, int], int] = {}
    block, position = 0, -1
    for before, index in zip([None, *indices], indices, strict=False):
        new = before is not None and index - before > usual
        block, position = (block + 1, 0) if new else (block, position + 1)
        places[block, position] = index
    return places


def _is_feature(name: str) -> bool:
    return name.startswith("features.")


def _copy(model: nn.Module, values: Mapping[str, Tensor], source: str) -> None:
    targets = model.state_dict()
    for name, value in values.items():
        if value.is_floating_point() != targets[name].is_floating_point():
            kind = str(value.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name} of {source} holds {kind}, which cannot be a starting weight")
        if not bool(torch.isfinite(value.to(torch.float32)).all()):
            raise ModelError(f"tensor {name} of {source} holds values that are not finite")
    for name, value in values.items():
        targets[name].copy_(value)  # converts to the model's own type


def _parts(names: Iterable[str]) -> str:
    counts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{part} {count}" for part, count in counts.items())


def _first(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "") if listed else "nothing"


def _shown(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "of a single number"
