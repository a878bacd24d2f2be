"""Which numbers of a record are logged, and under which names."""

from fedprophet.tracking.scalars import closing_scalars, round_scalars

RECORD = {
    "round": 7,
    "module": 2,
    "stage_round": 3,
    "adversarial_training": True,
    "epsilon": 0.75,
    "alpha": 0.3,
    "times": {"1": {"computation_s": 2.0, "access_s": 0.5}, "4": {"computation_s": 1.0, "access_s": 3.0}},
    "dropped": {"4": "its loss is nan"},
    "missing": {"train": [2], "evaluate": [2, 3]},
    "faults": {"3": "it hung"},
    "loss": 2.25,
    "clean": 0.5,
    "adversarial": 0.25,
    "samples": 8,
    "wire": {"sent": 1000, "received": 300, "whole_model": 9000},
}


def test_numbers_of_a_round():
    assert round_scalars(RECORD, 1.5) == {
        "accuracy/personalised/clean": 0.5,
        "accuracy/personalised/pgd": 0.25,
        "training/loss": 2.25,
        "training/eps": 0.75,
        "training/alpha": 0.3,
        "training/module": 2.0,
        "training/stage_round": 3.0,
        "time/seconds": 1.5,
        "time/simulated_seconds": 4.0,  # client 4 is the slowest
        "clients/dropped_updates": 1.0,
        "clients/lost_answers": 3.0,  # clients 2, 3 and 4
        "wire/sent_bytes": 1000.0,
        "wire/received_bytes": 300.0,
    }


def test_a_round_without_attack_or_accuracy():
    """A warm-up perturbs nothing. Without a held-out sample there is no accuracy, not one of zero."""
    warm_up = {"round": 1, "adversarial_training": False, "epsilon": 0.1, "dropped": {}, "loss": float("nan")}
    warm_up |= {"clean": 0.0, "adversarial": 0.0, "samples": 0, "alpha": None, "times": {}}
    assert round_scalars(warm_up, 2.0) == {
        "training/eps": 0.0,
        "time/seconds": 2.0,
        "clients/dropped_updates": 0.0,
        "clients/lost_answers": 0.0,
    }


def test_real_devices_have_no_simulated_time():
    assert "time/simulated_seconds" not in round_scalars(RECORD, 1.5, simulated=False)


def test_the_round_that_measures_statistics():
    refresh = {"round": 10, "refresh": "attacked", "times": {}, "dropped": {}, "refreshed": ["1.running_mean"]}
    assert round_scalars(refresh, 2.0) == {
        "time/seconds": 2.0,
        "clients/dropped_updates": 0.0,
        "clients/lost_answers": 0.0,
    }


def test_closing_accuracies():
    results = {
        "rounds": 4,
        "personalised": {"clean": {"accuracy": 0.9, "samples": 10}, "pgd20": {"accuracy": 0.0, "samples": 0}},
        "global": {"clean": {"accuracy": 0.8, "samples": 10}, "pgd20": {"accuracy": 0.4, "samples": 10}},
    }
    assert closing_scalars(results) == {
        "final/personalised/clean": 0.9,
        "final/global/clean": 0.8,
        "final/global/pgd20": 0.4,
    }
