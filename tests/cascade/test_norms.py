"""Which tensors of norm layers clients keep to themselves, and which are federated."""

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import chain_of, explicit_chain
from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.channels import first_channels
from fedprophet.cascade.narrow import narrow_chain
from fedprophet.cascade.norms import (
    norm_modules,
    norm_names,
    share_norm_layers,
    statistics_names,
    variances,
)
from fedprophet.engines.cpu_plan import fast_plan
from fedprophet.models import build

LAYERS = ("local", "shared", "statistics-local", "frozen")
AFFINE, KEPT = ("weight", "bias"), ("running_mean", "running_var", "num_batches_tracked")


def of(norm, endings):
    return [f"{norm}.{ending}" for ending in endings]


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Flatten()
    )


class WithOthers(nn.Module):
    """Has a buffer that is no norm layer's, a norm layer without an affine part, and one without statistics."""

    def __init__(self):
        super().__init__()
        self.conv, self.bare = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False)
        self.passing = nn.BatchNorm2d(4, track_running_stats=False)
        self.register_buffer("scale", torch.full((4, 1, 1), 2.0))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last((self.passing(self.bare(self.conv(x))) * self.scale).flatten(1))


MOVED = {
    "local": [],
    "shared": [*of("1", (*AFFINE, *KEPT)), *of("4", (*AFFINE, *KEPT))],
    "statistics-local": [*of("1", AFFINE), *of("4", AFFINE)],
    "frozen": [*of("1", (*AFFINE, *KEPT)), *of("4", (*AFFINE, *KEPT))],
}


@pytest.mark.parametrize("layers", LAYERS)
def test_what_is_federated_of_norm_layers(layers):
    chain = share_norm_layers(chain_of(convolutions()), layers)
    others = [*of("0", AFFINE), *of("3", AFFINE)]
    everything = {*others, *MOVED["shared"]}
    assert set(chain.shared()) == {*others, *MOVED[layers]}
    assert set(chain.local()) == everything - {*others, *MOVED[layers]}
    assert len(chain.shared()) + len(chain.local()) == len(everything)


@pytest.mark.parametrize("layers", LAYERS)
def test_every_tensor_stays_with_its_atom(layers):
    plain = chain_of(convolutions())
    chain = share_norm_layers(plain, layers)
    for atom in range(len(plain)):
        before, after = ((c.shared(atom, atom + 1), c.local(atom, atom + 1)) for c in (plain, chain))
        assert {*before[0], *before[1]} == {*after[0], *after[1]}
        assert after[0][: len(before[0])] == before[0], "names that were shared before keep their places"


@pytest.mark.parametrize("layers", LAYERS)
def test_other_buffers_stay_with_the_clients(layers):
    chain = share_norm_layers(chain_of(WithOthers()), layers)
    always = {*of("conv", AFFINE), *of("last", AFFINE), *of("passing", AFFINE)}
    moved = of("bare", KEPT) if layers in ("shared", "frozen") else []
    assert set(chain.shared()) == {*always, *moved}, "a layer without statistics is an ordinary one"
    assert set(chain.local()) == {"scale", *of("bare", KEPT)} - {*moved}


@pytest.mark.parametrize("layers", LAYERS)
def test_a_model_without_norm_layers_is_the_same_in_every_choice(layers):
    plain = chain_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 3)))
    chain = share_norm_layers(plain, layers)
    assert (chain.shared_names, chain.local_names) == (plain.shared_names, plain.local_names)
    assert chain.local() == norm_names(chain) == statistics_names(chain) == ()
    assert norm_modules(chain) == {}


def test_a_vgg_keeps_its_norm_layers_or_shares_them_all():
    model = build("vgg-small", (1, 8, 8), 10, width=4)
    plain = chain_of(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    shared, affine = (share_norm_layers(plain, layers) for layers in ("shared", "statistics-local"))
    assert set(plain.local()) == {name for norm in norms for name in of(norm, (*AFFINE, *KEPT))}
    assert shared.local() == ()
    assert set(affine.local()) == {name for norm in norms for name in of(norm, KEPT)}
    assert norm_names(shared) == norm_names(plain) == tuple(n for n in plain.tensors if n in plain.local())
    assert statistics_names(shared) == tuple(name for norm in norms for name in of(norm, KEPT[:2]))
    assert list(norm_modules(shared)) == norms, "in the order they run"


@pytest.mark.parametrize("layers", LAYERS)
def test_sub_networks_and_plans_keep_the_choice(layers):
    model = convolutions()
    chain = share_norm_layers(chain_of(model), layers)
    channels = channels_of(model, (1, 8, 8))
    kept = {group: first_channels(size, 2) for group, size in channels.groups.items()}
    narrow = narrow_chain(chain, channels, kept)
    for other in (narrow, fast_plan(chain), fast_plan(narrow)):
        assert (other.shared_names, other.local_names) == (chain.shared_names, chain.local_names)
        assert norm_names(other) == norm_names(chain)
        assert list(norm_modules(other)) == ["1", "4"]
    assert [len(module.running_mean) for module in norm_modules(narrow).values()] == [2, 6], "outputs are never cut"


def test_norm_layers_of_a_range_of_atoms():
    chain = explicit_chain([("one", convolutions()[:2]), ("two", convolutions()[3:5])])
    assert list(norm_modules(chain)) == ["one.1", "two.4"]
    assert list(norm_modules(chain, 1)) == ["two.4"]
    assert list(norm_modules(chain, 0, 1)) == ["one.1"]


def test_a_layer_that_is_a_whole_model_has_names_without_a_prefix():
    chain = share_norm_layers(explicit_chain(nn.Sequential(nn.BatchNorm1d(2))), "shared")
    assert set(chain.shared()) == {*of("0", (*AFFINE, *KEPT))}
    alone = {"running_mean": torch.zeros(1), "running_var": torch.ones(1)}
    assert variances(alone) == {"running_var": "running_mean"}


def test_variances_are_those_that_come_with_their_mean():
    tensors = dict.fromkeys(["a.running_var", "a.running_mean", "b.running_var", "c.running_mean", "d.running_varied"])
    assert variances(tensors) == {"a.running_var": "a.running_mean"}
    twice = dict.fromkeys(["adversarial.a.running_var", "adversarial.a.running_mean", "a.running_mean"])
    assert variances(twice) == {"adversarial.a.running_var": "adversarial.a.running_mean"}
