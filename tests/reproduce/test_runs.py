"""Which runs experiments plan: their configurations, and those that they share."""

from pathlib import Path
from types import SimpleNamespace

from fedprophet.reproduce import runs
from fedprophet.reproduce.registry import BUDGETS, EXPERIMENTS, JOINT, STRONG_CONVEXITY
from fedprophet.reproduce.runs import Setup, Variant, once, with_scale
from fedprophet.reproduce.scales import PAPER, SMALL

BALANCED, UNBALANCED = PAPER.settings[:2]


def names(setup: Setup, experiment: str) -> set[str]:
    return {run.name for run in EXPERIMENTS[experiment].source.runs(setup)}


def test_experiments_share_the_cascade_of_the_main_table() -> None:
    setup = Setup(SMALL, Path("out"))
    main = "digits-paper-fedprophet-seed0"
    assert all(main in names(setup, name) for name in ("table2", "table3", "figure8", "figure9", "figure10"))
    every = once(run for experiment in EXPERIMENTS.values() for run in experiment.source.runs(setup))
    # 8 methods, a small model, 3 ablations, 5 further values of mu and 3 further budgets.
    assert len(every) == 8 + 1 + 3 + 5 + 3
    assert len({run.path for run in every}) == len(every)


def test_shared_runs_have_the_settings_of_their_rows() -> None:
    setup = Setup(PAPER, Path("out"))
    found = {mu: setup.config(BALANCED, variant).train.strong_convexity for mu, variant in STRONG_CONVEXITY.items()}
    assert found == {mu: float(mu) for mu in ("0", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3")}
    budgets = [setup.config(BALANCED, variant).memory.budget for variant in BUDGETS.values()]
    assert budgets[:4] == ["60MB", "40%", "60%", "80%"]  # 60 MB is a fifth of 302 MB
    assert BUDGETS["1.0"] is JOINT


def test_a_variant_that_no_fleet_changes_is_trained_on_the_balanced_one() -> None:
    setup = Setup(PAPER, Path("out"))
    (run,) = setup.planned(UNBALANCED, JOINT)
    assert (run.name, run.config.fleet.exponent) == ("cifar10-balanced-jfat-seed0", 0)
    (run,) = setup.planned(UNBALANCED, Variant("heterofl", "heterofl"))
    assert (run.name, run.config.fleet.exponent) == ("cifar10-unbalanced-heterofl-seed0", -1.6)


def test_what_makes_a_row_is_stronger_than_what_the_user_sets() -> None:
    setup = Setup(PAPER, Path("out"), ("train.strong_convexity=1", "train.batch=8", "method=jfat", "seed=9"))
    config = setup.config(BALANCED, STRONG_CONVEXITY["1e-3"], seed=2)
    assert (config.train.strong_convexity, config.train.batch) == (1e-3, 8)
    assert (config.method, config.seed) == ("fedprophet", 2)


def test_a_finished_run_is_measured_for_what_the_tables_show(monkeypatch) -> None:
    """AutoAttack on the exported model, which no table has, would take as long again."""
    asked = []
    opened = SimpleNamespace(session=SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(runs, "open_to_read", lambda path: opened)
    monkeypatch.setattr(runs, "evaluate_run", lambda run, attacks, **how: asked.append((attacks, how["of"])))
    planned = SimpleNamespace(state="finished", path=Path("run"), unmeasured=lambda attacks: list(attacks))
    runs._carry_out(planned, ("autoattack",), None)
    assert asked == [(["autoattack"], "personalised")]


def test_only_some_settings() -> None:
    setup = Setup(PAPER, Path("out"), only=("caltech256-unbalanced",))
    assert {run.setting.preset for run in EXPERIMENTS["table2"].source.runs(setup)} == {
        "caltech256-unbalanced",
        "caltech256-balanced",  # where jFAT, which no fleet changes, is trained
    }
    assert EXPERIMENTS["figure8"].source.runs(setup) == ()


def test_only_some_settings_are_clocked_and_tables_of_devices_do_not_care() -> None:
    setup = Setup(PAPER, Path("out"), only=("caltech256-unbalanced",))
    assert [setting.preset for setting in with_scale(setup, PAPER).settings] == ["caltech256-unbalanced"]
    assert len(with_scale(Setup(SMALL, Path("out"), only=("digits-paper",)), PAPER).settings) == 4
    assert [len(part.values) for part in EXPERIMENTS["table5"].source.parts(setup)] == [10]
