"""The mean of a model over its last rounds."""

import torch

from fedprophet.server.horizon import RunningMean


def followed(values: list[float], horizon: int) -> list[float]:
    """Return the mean after each of some rounds, of a model of one parameter."""
    mean = RunningMean({"w": torch.tensor([float(values[0])])})
    means = [mean]
    for value in values[1:]:
        mean = mean.after({"w": torch.tensor([float(value)])}, horizon)
        means.append(mean)
    assert [each.rounds for each in means] == list(range(1, len(values) + 1))
    return [float(each.parameters["w"]) for each in means]


def test_up_to_the_horizon_it_is_the_mean_of_all_rounds_and_then_earlier_ones_fade() -> None:
    # (8 + 4) / 2 = 6; then half of the way each time: (6 + 2) / 2 = 4, (4 + 12) / 2 = 8
    assert followed([8, 4, 2, 12], horizon=2) == [8, 6, 4, 8]
    assert followed([8, 4, 3, 1], horizon=4) == [8, 6, 5, 4]


def test_what_counts_is_the_latest_and_what_a_round_leaves_alone_stays_the_same_tensor() -> None:
    kept, before = torch.tensor([3.0]), {"w": torch.tensor([1.0]), "batches": torch.tensor(7)}
    after = RunningMean({**before, "kept": kept}).after(
        {"w": torch.tensor([2.0]), "batches": torch.tensor(9), "kept": kept}, horizon=10
    )
    assert after.parameters["kept"] is kept
    assert int(after.parameters["batches"]) == 9
    assert float(after.parameters["w"]) == 1.5
    assert float(before["w"]) == 1.0, "nothing is changed in place"


def test_it_has_the_type_of_the_model_and_no_rounding_of_its_own() -> None:
    low, high = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)
    mean = RunningMean({"w": low}).after({"w": high}, horizon=2)
    assert mean.parameters["w"].dtype == torch.bfloat16
    assert followed([1.0, 1.0 + 2**-22], horizon=2)[-1] == 1.0 + 2**-23
