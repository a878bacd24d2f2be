"""What is made of the timings: medians, speed-ups, shares, projections."""

from dataclasses import replace

import pytest

from fedprophet.bench import report
from fedprophet.bench.rounds import EVALUATION, TRAINING, WARMUP, Case, CaseResult, RoundsSettings, Timing
from fedprophet.display.tables import markdown

ABOUT = {
    "date": "2026-01-02 03:04 UTC",
    "processor": "a processor",
    "cores": 2,
    "memory_bytes": 10**9,
    "load": 0.5,
    "load_after": 1.5,
    "gpu": None,
    "gpu_memory_bytes": None,
    "cuda": None,
    "triton": None,
    "tf32": None,
    "python": "3.11.7",
    "torch": "2.13.0",
    "fedprophet": "0.1.0",
}
PRODUCT = {"side": 2048, "type": "float32", "flops": 200e9}


def sample(round, seconds, flops=1e9, peak=10**6):
    return Timing(round, 10, seconds, flops, peak, first=2 * seconds)


def measured(case, engine, training, warmup, evaluation, stages=1, server=0.25):
    parts = {
        part: [sample(number, s) for number, s in enumerate(seconds, start=1)]
        for part, seconds in ((TRAINING, training), (WARMUP, warmup), (EVALUATION, evaluation))
    }
    return CaseResult(case, engine, stages, parts, [server] * len(training))


@pytest.fixture
def settings(tiny_flags):
    # Ten rounds with two of warm-up, evaluated every third and at the end: four times.
    changes = {"rounds": 10, "train.warmup": 2, "evaluate.every": 3, "convergence.patience": 5}
    overrides = tuple(text for text in tiny_flags(changes) if text != "--set")
    return RoundsSettings("digits", overrides, engines=("plain", "cuda"))


@pytest.fixture
def found(settings):
    sides = [
        measured(Case("jfat"), "plain", [8.0], [4.0], [6.0]),
        measured(Case("jfat"), "cuda", [2.0, 1.0, 9.0], [1.0, 1.0, 1.0], [3.0, 1.0, 2.0]),
        measured(Case("fedprophet", 0), "cuda", [1.0], [0.5], [2.0], stages=2),
        measured(Case("fedprophet", 1), "cuda", [3.0], [1.5], [4.0], stages=2),
    ]
    return report.document(settings, ABOUT, PRODUCT, sides)


def lines(found):
    """Return the page's table rows as lists of cells, and its other lines."""
    text = markdown(report.rounds_page(found)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text if line.startswith("|")]
    return cells, "\n".join(line for line in text if not line.startswith("|"))


def row(found, method, engine, part, stage=None):
    (one,) = [
        row
        for row in found["measurements"]
        if (row["method"], row["stage"], row["engine"], row["part"]) == (method, stage, engine, part)
    ]
    return one


def test_seconds_are_medians_with_their_range(found):
    fast = row(found, "jfat", "cuda", TRAINING)
    assert (fast["seconds"], fast["seconds_least"], fast["seconds_most"], fast["rounds"]) == (2.0, 1.0, 9.0, 3)
    # The rate is the median of 1 GFLOP in 2, 1 and 9 seconds, and its share is of 200 GFLOP/s.
    assert fast["flop_per_s"] == 0.5e9
    assert fast["of_product"] == 0.0025
    assert fast["first_s"] == 18.0


def test_the_speedup_is_over_the_rounds_both_have_played(found):
    # The plain loop has played the first round alone: 8 s against 2 s there, whatever the others took.
    assert row(found, "jfat", "cuda", TRAINING)["speedup"] == 4.0
    assert row(found, "jfat", "cuda", EVALUATION)["speedup"] == 2.0
    assert row(found, "jfat", "plain", TRAINING)["speedup"] is None
    assert row(found, "fedprophet", "cuda", TRAINING, 1)["speedup"] is None


def test_means_are_over_the_stages(found):
    means = {(m["method"], m["engine"], m["part"]): m["seconds"] for m in found["mean_round"]}
    assert means["fedprophet", "cuda", TRAINING] == 2.0
    assert means["fedprophet", "cuda", EVALUATION] == 3.0
    assert means["jfat", "cuda", TRAINING] == 2.0


def test_of_two_plain_loops_the_faster_one_counts(settings):
    sides = [
        measured(Case("jfat"), "plain", [8.0, 9.0], [1.0, 1.0], [6.0, 6.0]),
        measured(Case("jfat"), "plain-1", [6.0, 6.0], [2.0, 2.0], [6.5, 6.5]),
        measured(Case("jfat"), "workers", [2.0, 3.0], [0.5, 0.5], [3.0, 3.0]),
    ]
    found = report.document(replace(settings, engines=("plain", "plain-1", "workers")), ABOUT, PRODUCT, sides)
    speedups = {(r["engine"], r["part"]): r["speedup"] for r in found["measurements"]}
    # Training: 6 s with one thread, so 3 and 2 times in the two rounds. Evaluation: 6 s with all threads.
    assert speedups["workers", TRAINING] == 2.5
    assert speedups["workers", WARMUP] == 2.0
    assert speedups["workers", EVALUATION] == 2.0
    assert speedups["plain", TRAINING] == pytest.approx((6 / 8 + 6 / 9) / 2)
    assert speedups["plain-1", TRAINING] is None
    assert speedups["plain-1", WARMUP] == 0.5
    assert speedups["plain", EVALUATION] is None
    means = {(m["engine"], m["part"]): m["speedup"] for m in found["mean_round"]}
    # The ratio of the medians, 6 and 2.5.
    assert means["workers", TRAINING] == pytest.approx(2.4)
    assert means["plain-1", TRAINING] is None
    table, text = lines(found)
    assert ["jfat", "workers", "2.50 (2.40×)", "0.500 (2.00×)", "3.00 (2.00×)"] in table
    assert "plain-1" in text


def test_a_run_is_projected_from_its_rounds(found):
    projected = {(p["method"], p["engine"]): p for p in found["projection"]}
    # Two rounds of warm-up, eight attacked, four evaluations, ten times a quarter of a second of the server's.
    assert projected["jfat", "plain"]["seconds"] == 2 * 4.0 + 8 * 8.0 + 4 * 6.0 + 2.5
    both = projected["fedprophet", "cuda"]
    assert both["seconds_by_part"] == {WARMUP: 2 * 2.0, TRAINING: 8 * 4.0, EVALUATION: 4 * 6.0, "server": 5.0}
    assert both["seconds"] == 65.0
    assert (both["stages"], both["rounds_per_stage"], both["warmup_rounds"], both["evaluations"]) == (2, 10, 2, 4)


def test_a_projection_leaves_out_the_evaluations_that_a_cascade_spares(settings):
    spare = replace(settings, overrides=(*settings.overrides, "convergence.gate=5", "evaluate.before_gate=7"))
    sides = [measured(Case(name), "plain", [1.0], [1.0], [1.0]) for name in ("jfat", "fedprophet")]
    projected = {p["method"]: p["evaluations"] for p in report.document(spare, ABOUT, PRODUCT, sides)["projection"]}
    # jfat: 3, 6, 9 and 10. The gate of a stage opens after round 2 + 5: 7, 9 and 10.
    assert projected == {"jfat": 4, "fedprophet": 3}


def test_a_projection_counts_the_stages_without_warm_up(settings):
    once = replace(settings, overrides=(*settings.overrides, "train.warmup_stages=first"))
    sides = [measured(Case("fedprophet", stage), "plain", [8.0], [4.0], [1.0], stages=2) for stage in (0, 1)]
    (projected,) = report.document(once, ABOUT, PRODUCT, sides)["projection"]
    # Two rounds of warm-up and eight attacked, then ten attacked.
    assert projected["seconds_by_part"] == {WARMUP: 2 * 4.0, TRAINING: 18 * 8.0, EVALUATION: 8 * 1.0, "server": 5.0}


def test_a_run_whose_stages_were_not_all_measured_is_not_projected(settings):
    some = [measured(Case("fedprophet", 1), "plain", [1.0], [1.0], [1.0], stages=2)]
    assert report.document(settings, ABOUT, PRODUCT, some)["projection"] == []


def test_what_ran_out_of_memory_is_told(settings):
    failed = CaseResult(Case("jfat"), "plain", failure="out of memory: tried to allocate 2 GiB")
    found = report.document(settings, ABOUT, PRODUCT, [failed, measured(Case("jfat"), "cuda", [2.0], [1.0], [3.0])])
    assert row(found, "jfat", "plain", TRAINING)["failure"].startswith("out of memory")
    assert row(found, "jfat", "cuda", TRAINING)["speedup"] is None
    assert [p["engine"] for p in found["projection"]] == ["cuda"]
    table, text = lines(found)
    assert ["jfat", "plain", "out of memory", *["–"] * 5] in table
    assert "jfat on plain: out of memory: tried to allocate 2 GiB" in text


def test_the_page_for_people(found):
    table, text = lines(found)
    assert "- a processor, 2 cores, load 0.5 before and 1.5 after" in text
    assert "engines: plain in float32 on 1 core, cuda in bfloat16 on 1 core" in text
    assert "matrix product of 2048×2048 in float32: 200 GFLOP/s" in text
    assert "plain-1" not in text
    for expected in (
        "jfat | cuda | 2.00 | 1.00–9.00 | 0.500 | 0.2 % | 1.0 MB | 4.00×",
        "stage 2 | cuda | 3.00 | one round | 0.333 | 0.2 % | 1.0 MB | –",
        "fedprophet, 2 stages | cuda | 2.00 | 1.00 | 3.00",
        "jfat | cuda | 2.00 (4.00×) | 1.00 (4.00×) | 2.00 (3.00×)",
        "fedprophet | cuda | 2 × 10 | 0:00:36 | 0:00:24 | 0:00:05 | 0:01:05",
    ):
        assert expected.split(" | ") in table


def test_a_gpu_is_named_with_its_versions(found):
    gpu = {"gpu": "a GPU", "gpu_memory_bytes": 139 * 10**9, "cuda": "12.9", "triton": "3.5"}
    there = {
        **found,
        "machine": {**ABOUT, **gpu, "tf32": {"convolutions": True, "products": False}},
        "product": {"side": 8192, "type": "bfloat16", "flops": 790e12},
    }
    first, versions, _, engines, product = report.rounds_page(there).lines
    assert first.startswith("a GPU (139.0 GB), a processor, 2 cores")
    assert "CUDA 12.9, Triton 3.5" in versions
    assert engines.endswith("plain in float32, cuda in bfloat16 (float32 convolutions in TF32, as torch is set)")
    assert product == "matrix product of 8192×8192 in bfloat16: 790 TFLOP/s"
