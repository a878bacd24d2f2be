"""`fedprophet report`, and the page that `fedprophet train` ends with."""

import json

import pytest

from fedprophet.cli import report
from fedprophet.report.page import MARK


def is_report(path):
    return path.read_text().startswith(MARK)


def test_one_run_has_its_report_in_its_folder(cli, copied):
    path = copied()
    said = cli("report", "run")
    assert (said.code, said.out) == (0, "Report: run/report.html\n")
    assert is_report(path / "report.html")
    assert cli("report", "run", "run/").out == said.out, "it is one run, whatever it is called"


def test_several_runs_have_theirs_here(cli, finished, tmp_path):
    said = cli("report", finished(), finished("jfat"))
    assert (said.code, said.out) == (0, "Report: report.html\n")
    assert is_report(tmp_path / "report.html")


def test_out_names_the_file(cli, finished, tmp_path):
    assert cli("report", finished(), "--out", "a folder/ü & co.html").out == "Report: a folder/ü & co.html\n"
    assert is_report(tmp_path / "a folder" / "ü & co.html")
    assert not (finished() / "report.html").exists()


def test_json_is_the_document_and_writes_a_page_only_if_asked(cli, finished, tmp_path):
    document = cli("report", finished(), "--json").json
    results = json.loads((finished() / "results.json").read_text())
    (run,) = document["runs"]
    assert run["rounds"] == results["rounds"]
    assert [module["memory"] for module in run["cascade"]["modules"]] == [
        module["memory_bytes"] for module in results["modules"]
    ]
    assert run["time"]["access"] == pytest.approx(results["simulated"]["access_s"])
    assert [(stage["best"], stage["epsilon"]) for stage in run["stages"]] == [
        (stage["round"], pytest.approx(stage["radius"])) for stage in results["stages"]
    ]
    assert not list(tmp_path.glob("*.html"))
    assert cli("report", finished(), "--json", "--out", "page.html").json == document
    assert is_report(tmp_path / "page.html")


def test_what_cannot_be_read_or_written_is_said(cli, copied, tmp_path):
    path = copied()
    assert "there is no run in" in cli("report", tmp_path / "nothing").error
    (path / "report.html").write_text("my notes")
    assert "is not a report of fedprophet, and stays as it is" in cli("report", "run").error
    assert (path / "report.html").read_text() == "my notes"


# The end of a run ----------------------------------------------------------------------------------------------------


def test_training_ends_with_a_report(cli, tiny_flags, quick, tmp_path):
    said = cli("train", *tiny_flags(quick), "--method", "jfat", "--out", "my run")
    assert said.out.endswith("Files: my run\nReport: my run/report.html\n")
    assert is_report(tmp_path / "my run" / "report.html")


def test_with_json_it_is_written_without_a_word(cli, copied):
    path = copied()
    said = cli("train", "--resume", "run", "--json")
    assert said.json == json.loads((path / "results.json").read_text())
    assert "eport" not in said.err
    assert is_report(path / "report.html")


def test_a_report_that_fails_does_not_spoil_the_run(cli, copied, monkeypatch):
    path = copied()
    before = (path / "results.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_page", full)
    said = cli("train", "--resume", "run")
    assert said.code == 0
    assert "Files: run" in said.out
    assert "note: no report was made: [Errno 28] No space left on device" in said.err
    assert (path / "results.json").read_bytes() == before


def test_a_file_of_the_users_stays(cli, copied):
    path = copied()
    (path / "report.html").write_text("my notes")
    assert "note: no report was made: " in cli("train", "--resume", "run").err
    assert (path / "report.html").read_text() == "my notes"
