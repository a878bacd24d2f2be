"""What stacks made, on its way to the host."""

from types import SimpleNamespace

import torch

from fedprophet.engines.returning import later, to_host


def test_each_job_gets_its_row_when_it_is_asked_for():
    finished = []

    def finish(job, row):
        finished.append(job.name)
        return job.name, row.tolist()

    answers = later([SimpleNamespace(name="a"), SimpleNamespace(name="b")], torch.tensor([[1, 2], [3, 4]]), finish)
    assert finished == []
    assert list(answers) == [("a", [1, 2]), ("b", [3, 4])]


def test_tables_keep_their_names_and_shapes():
    tables = [{"x": torch.ones(2, 3), "y": torch.zeros(4)}, {"x": torch.full((1,), 7.0)}]
    found = to_host(tables)
    assert [list(table) for table in found] == [["x", "y"], ["x"]]
    assert all(torch.equal(one[name], other[name]) for one, other in zip(found, tables, strict=True) for name in other)
