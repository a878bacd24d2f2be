"""The page: one file that holds all it needs, and nothing of a run is taken for markup. Drawn in tests/e2e."""

import base64
import hashlib
import json
import re

import pytest

from fedprophet.errors import CheckpointError, ConfigError
from fedprophet.report.document import Report, report_of
from fedprophet.report.page import MARK, embedded, page, write_page


def held(text):
    """The document that a page holds."""
    return json.loads(re.search(r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_holds_its_document(write_cascade):
    report = report_of([write_cascade("run")])
    text = page(report)
    assert held(text) == json.loads(json.dumps(report.to_json()))
    assert text.startswith(MARK)
    assert "{{" not in text.split("<style>")[0]
    assert "<title>FedProphet · FedProphet report</title>" in text


def test_it_refers_to_nothing_else(write_run):
    text = page(report_of([write_run("run")]))
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize(("live", "connections"), [(False, "connect-src 'none'"), (True, "connect-src 'self'")])
def test_only_its_own_style_and_program_may_run(write_run, live, connections):
    text = page(report_of([write_run("run")]), live)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    for kind, tag in (("style-src", "style"), ("script-src", "script")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} &#x27;sha256-{digest}&#x27;" in policy
    assert connections.replace("'", "&#x27;") in policy
    assert "default-src &#x27;none&#x27;" in policy


NASTY = "</script><script>alert(1)</script><!-- \" ' & \u2028 \u2029 \udcff ü 🦉 {{title}}"


def test_nothing_of_a_run_is_markup(write_run):
    text = embedded({"name": NASTY})
    assert json.loads(text) == {"name": NASTY}
    assert not set("<>&\u2028\u2029") & set(text)
    text.encode()  # a name that is no text can be written nevertheless


def test_names_of_folders_are_text_in_the_title_too(write_run, tmp_path):
    for seed in (1, 2):
        write_run(f"<b>&{{{{script}}}} {seed}", "jfat")
    text = page(report_of(sorted(tmp_path.iterdir())))
    assert "<b>" not in text.split("<style>")[0]
    assert "&lt;b&gt;&amp;{{script}} 1" in text.split("<style>")[0]
    assert [run["name"] for run in held(text)["runs"]] == ["<b>&{{script}} 1", "<b>&{{script}} 2"]


def test_a_file_that_is_no_report_is_not_overwritten(write_run, tmp_path):
    report, file = report_of([write_run("run")]), tmp_path / "new" / "report.html"
    write_page(report, file)
    first, made = file.read_bytes(), file.stat()
    write_page(report, file)
    assert file.stat() == made, "the same page is not written again"
    write_page(Report(()), file)
    assert file.read_bytes() != first, "our own is written anew"
    file.write_text("<html>mine")
    with pytest.raises(ConfigError, match="is not a report of fedprophet, and stays as it is"):
        write_page(report, file)
    assert file.read_text() == "<html>mine"
    with pytest.raises((ConfigError, CheckpointError), match="cannot write"):
        write_page(report, tmp_path)


def test_a_long_run_stays_small(write_run):
    """2,000 rounds of ten clients out of 100, each round evaluated: far below 2 MB."""
    client = (1.25, 0.5, 3.75, 60_000_000)
    notes = [
        {"module": 1 + n // 300, "epsilon": n / 7, "alpha": n / 3, "clean": n / 2000, "adversarial": n / 4000,
         "samples": 9, "assigned": {str((7 * n + k) % 100): 7 for k in range(10)},
         "dropped": {"1": f"its loss is {n}"}}
        for n in range(2000)
    ]  # fmt: skip
    report = report_of([write_run("run", "fedprophet", rounds=[[client] * 10] * 2000, notes=notes)])
    assert len(report.runs[0].curve.round) <= 420
    assert len(page(report)) < 400_000
