"""Random draws of a model are refused where they happen; those of other threads are nobody's business."""

import cProfile
import importlib
import random
import sys
import threading

import pytest
import torch
from torch import nn

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.draws import RandomDrawError, draws_refused
from fedprophet.errors import ModelError

PYTHON_GENERATOR, TORCH_GENERATOR = random.Random(3), torch.Generator().manual_seed(3)


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner, self.draw = nn.Linear(2, 2), draw

    def forward(self, x):
        return self.inner(x) * self.draw()


def states():
    return [
        random.getstate(),
        PYTHON_GENERATOR.getstate(),
        torch.get_rng_state().tolist(),
        TORCH_GENERATOR.get_state().tolist(),
    ]


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        PYTHON_GENERATOR.random,
        lambda: random.gauss(1, 2),
        lambda: random.choice([1, 2]),
        lambda: torch.rand(()),
        lambda: torch.rand((), generator=TORCH_GENERATOR),
        lambda: torch.empty(2).random_(3),
        lambda: nn.functional.dropout(torch.ones(2)),
        lambda: torch.randperm(2),
    ],
)
def test_draws_are_refused_before_they_happen_and_where(draw):
    model = nn.Sequential(nn.Linear(2, 2), Noisy(draw))
    before = states()
    with pytest.raises(ModelError) as error:
        chain_of(model)
    assert states() == before
    text = str(error.value)
    assert "draws random numbers that do not depend on its input" in text
    assert "submodule '1'" in text
    assert "test_draws.py, line" in text
    assert "explicit_chain" in text


def test_a_model_that_catches_the_refusal_is_refused_all_the_same():
    def stubborn():
        try:
            return random.random()
        except Exception:
            return random.random()

    with pytest.raises(ModelError, match="draws random numbers"):
        chain_of(Noisy(stubborn))


@pytest.mark.parametrize(
    "draw", [lambda: nn.functional.dropout(torch.ones(2), training=False), lambda: len(random.getstate())]
)
def test_what_draws_nothing_is_traced(draw):
    assert len(chain_of(nn.Sequential(nn.Linear(2, 2), Noisy(draw)))) == 2


def test_draws_that_depend_on_the_input_are_operations_of_the_model():
    class Dropped(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, training=True) + torch.rand_like(x)

    chain = chain_of(Dropped())
    assert not torch.equal(chain.run(torch.ones(9, 9)), chain.run(torch.ones(9, 9)))


def test_other_threads_may_draw_at_any_time():
    model, enough, drawn = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), threading.Event(), 0

    def draw():
        nonlocal drawn
        while not enough.is_set():
            random.random()
            torch.rand(())
            drawn += 1

    thread = threading.Thread(target=draw)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # a turn for each thread many times in a trace
    try:
        thread.start()
        for _ in range(50):
            before = drawn
            assert len(chain_of(model)) == 1
            while drawn == before and thread.is_alive():
                pass
    finally:
        sys.setswitchinterval(switch)
        enough.set()
        thread.join()
    assert drawn >= 50


def test_a_library_that_draws_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "drawing_library.py").write_text("import random\nNUMBER = random.Random(1).random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = Noisy(lambda: importlib.import_module("drawing_library").NUMBER)
    assert len(chain_of(model)) == 1


def test_the_profiler_that_is_active_goes_on_afterwards():
    calls = []

    def profiler(frame, event, argument):
        calls.append(event)

    sys.setprofile(profiler)
    try:
        with pytest.raises(RandomDrawError), draws_refused():
            random.random()
        left = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert left is profiler
    with draws_refused():
        pass
    assert sys.getprofile() is None


def test_draws_are_refused_under_cprofile_too():
    def marked():
        return 1

    profiler = cProfile.Profile()
    with profiler:
        with pytest.raises(RandomDrawError), draws_refused():
            random.random()
        marked()
    profiler.create_stats()
    assert any(name == "marked" for _, _, name in profiler.stats)


def test_a_profiler_that_cannot_be_started_again_stays():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], with_stack=True):
        active = sys.getprofile()
        with pytest.raises(RandomDrawError), draws_refused():
            torch.rand(())
        assert sys.getprofile() is active
