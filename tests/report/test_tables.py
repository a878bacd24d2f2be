"""The numbers as people, spreadsheets and programs read them."""

import csv
import io
import json

import pytest

from fedprophet.durations import Unit
from fedprophet.report.compare import Statistic, compare
from fedprophet.report.notes import reading
from fedprophet.report.tables import (
    csv_text,
    document,
    markdown,
    percent_text,
    setting_tables,
    time_text,
    time_unit,
    wire_csv,
)

PIECES = "attack 8 at a time, step atom by atom in pieces of 8"
HOUR, MINUTE, SECOND = Unit("h", 3600), Unit("min", 60), Unit("s", 1)
REACHED = {
    "best": {"round": 1, "clean": 0.7, "adversarial": 0.4},
    "last": {"round": 2, "clean": 0.6, "adversarial": 0.3},
}


def rows(table):
    return tuple(map(tuple, table.cells()))


def test_numbers_for_people():
    assert percent_text(Statistic(0.79749, None, 1)) == "79.7"
    assert percent_text(Statistic(0.79749, 0.00449, 3)) == "79.7 ± 0.4"
    assert time_text(HOUR, Statistic(220_000, None, 1)) == "61.1 h"
    assert time_text(HOUR, Statistic(220_000, 3600, 2)) == "61.1 ± 1.0 h"
    assert time_text(HOUR, Statistic(360, None, 1)) == "0.1 h"
    assert time_text(HOUR, Statistic(216, None, 1)) == "3.6 min", "nobody reads 0.06 h"
    assert time_text(HOUR, Statistic(36, None, 1)) == "36.0 s"
    assert time_text(MINUTE, Statistic(3.48, 0.1, 2)) == "3.5 s"
    assert time_text(SECOND, Statistic(0.0432, None, 1)) == "0.043 s"
    assert time_text(HOUR, Statistic(0, None, 1)) == "0.0 h"


@pytest.mark.parametrize(
    ("seconds", "unit"), [(119, "s"), (121, "min"), (7199, "min"), (7201, "h"), (863_999, "h"), (864_001, "days")]
)
def test_one_unit_of_time_for_all_rows_by_the_middle_one(write_run, seconds, unit):
    slow = write_run("slow", "jfat", rounds=[[(10 * seconds, 0, 1, 1)]])
    middle = write_run("middle", "feddf", rounds=[[(0, seconds, 1, 1)]])
    fast = write_run("fast", "fedprophet", rounds=[[(seconds / 10, 0, 1, 1)]])
    begun = write_run("begun", "fedrbn", rounds=[[(1, 0, 1, 1)]], finished=False)
    assert time_unit(compare([slow, middle, fast, begun]).settings[0].rows).name == unit, "only finished rows decide"
    assert time_unit(compare([begun]).settings[0].rows).name == "s"


@pytest.fixture
def comparison(write_run):
    """jFAT over two seeds (20 s and 40 s), FedProphet (12 s) and a FedRBN that is not finished."""
    return compare(
        [
            write_run("a", "jfat", "seed=0", rounds=[[(4, 16, 1, 2e6)]], clean=0.8, results=REACHED, autoattack=0.25),
            write_run("b", "jfat", "seed=1", rounds=[[(6, 34, 3, 3e6)]], clean=0.9, results=REACHED, autoattack=0.35),
            write_run("c", "fedprophet", rounds=[[(2, 1, 1, 1e6), (0, 4, 1, 7e6)], [(8, 0, 2, 5e5)]], pgd=0.625),
            write_run("d", "fedrbn", rounds=[[(1, 1, 1, 4e6)]], finished=False),
        ]
    )


def test_the_tables_by_hand(comparison):
    accuracy, cost, rounds = setting_tables(comparison.settings[0])
    assert [(column.group, column.heading) for column in accuracy.columns] == [
        ("", "Method"),
        ("", "Seeds"),
        *((kind, name) for kind in ("Personalised", "Global") for name in ("clean", "PGD-20", "AA")),
    ]
    # ± of 0.8 and 0.9: 0.1 / √2 = 0.0707.
    assert rows(accuracy) == (
        ("jFAT", "2", "85.0 ± 7.1", "50.0 ± 0.0", "30.0 ± 7.1", "42.5 ± 3.5", "25.0 ± 0.0", "30.0 ± 7.1"),
        ("FedRBN (seed 0, 1 round so far)", "1", "–", "–", "–", "–", "–", "–"),
        ("FedProphet", "1", "80.0", "62.5", "–", "40.0", "31.2", "–"),
    )
    # FedProphet: the second client is the slowest of round 1 (4 s of access), so 8 s + 4 s; jFAT 30 s in the mean.
    assert rows(cost) == (
        ("jFAT", "1", "3.0 MB", "3.0 MB", "30.0 ± 14.1 s", "5.0 s", "25.0 s", "1.00×", "2.0 s"),
        ("FedRBN (seed 0, 1 round so far)", "1", "4.0 MB", "4.0 MB", "2.0 s", "1.0 s", "1.0 s", "–", "1.0 s"),
        ("FedProphet", "2", "1.0 MB", "7.0 MB", "12.0 s", "8.0 s", "4.0 s", "2.50×", "3.0 s"),
    )
    assert rows(rounds) == (("jFAT", "1", "70.0 ± 0.0", "40.0 ± 0.0", "2", "60.0 ± 0.0", "30.0 ± 0.0"),)


def test_bytes_on_the_wire_by_hand(write_run):
    """jFAT's own run on Flower, and one of half the bytes over two seeds, in one of which a client failed."""

    def wire(sent, received, jfat):
        return {"wire": {"sent": sent, "received": received, "whole_model": jfat}}

    paths = [
        write_run("a", "jfat", notes=[wire(6_000_000, 5_000_000, 10_000_000), wire(6_000_000, 5_000_000, 10_000_000)]),
        write_run("b", "fedprophet", notes=[wire(2_000_000, 1_000_000, 20_000_000), {"missing": {"train": [1]}}]),
        write_run("c", "fedprophet", "seed=1", notes=[wire(4_000_000, 3_000_000, 20_000_000)]),
        write_run("d", "heterofl"),
    ]
    comparison = compare(paths)
    (table,) = [table for table in setting_tables(comparison.settings[0]) if "wire" in table.title]
    assert rows(table) == (
        ("jFAT", "12.0 MB", "10.0 MB", "22.0 MB", "20.0 MB", "110.0 %", "0"),
        ("FedProphet", "3.0 MB", "2.0 MB", "5.0 MB", "20.0 MB", "25.0 %", "1"),
    )
    assert [column.heading for column in table.columns[-3:]] == ["total", "of jFAT's", "Faults"]
    assert len([line for line in reading(comparison) if line.startswith("Wire")]) == 1
    rounds = list(csv.DictReader(io.StringIO(wire_csv(comparison))))
    assert list(rounds[0]) == ["run", "round", "sent", "received", "jfat", "faults"]
    assert [tuple(line.values())[1:] for line in rounds] == [
        ("1", "6000000", "5000000", "10000000", "0"),
        ("2", "6000000", "5000000", "10000000", "0"),
        ("1", "2000000", "1000000", "20000000", "0"),
        ("2", "", "", "", "1"),
        ("1", "4000000", "3000000", "20000000", "0"),
        ("2", "", "", "", "0"),
    ]
    assert [line["run"] for line in rounds] == [str(path) for path in paths[:3] for _ in range(2)]
    lines = {line["row"]: line for line in csv.DictReader(io.StringIO(csv_text(comparison)))}
    assert [lines["FedProphet"][f"wire_{part}_mb"] for part in ("sent", "received", "total", "jfat")] == [
        "3.000000",
        "2.000000",
        "5.000000",
        "20.000000",
    ]
    assert (lines["FedProphet"]["faults"], lines["HeteroFL-AT"]["wire_total_mb"]) == ("1", "")
    found = {row["label"]: row for row in document(comparison)["settings"][0]["rows"]}
    assert found["FedProphet"]["wire_bytes"]["total"]["mean"] == 5_000_000
    assert [run["wire_bytes"]["total"] for run in found["FedProphet"]["runs"]] == [3_000_000, 7_000_000]
    assert found["HeteroFL-AT"]["wire_bytes"] == dict.fromkeys(("sent", "received", "total", "jfat"))
    assert found["HeteroFL-AT"]["runs"][0]["wire_bytes"] is None
    assert (found["FedProphet"]["faults"], found["FedProphet"]["runs"][0]["faults"]) == (1, 1)


def test_without_flower_there_is_no_table_of_bytes(write_run):
    comparison = compare([write_run("a")])
    assert not any("wire" in table.title for table in setting_tables(comparison.settings[0]))
    assert not any("Wire" in line for line in reading(comparison))
    assert wire_csv(comparison) is None


def _plans(*taken):
    return {
        "plans": {
            str(client): {"plan": plan, "peak_bytes": peak, "limit_bytes": limit}
            for client, (plan, peak, limit) in enumerate(taken)
        }
    }


@pytest.fixture
def enforced(write_run):
    """Two seeds whose memory was enforced, and a jFAT whose memory was not."""
    on = ("fedprophet", "memory.enforce=true")
    first = [
        _plans(("plain", 3_000_000, 4_000_000), (PIECES, 950_000, 1_000_000)),
        _plans((PIECES, 900_000, 1_000_000)),
    ]
    second = [_plans(("plain", 3_000_000, 9_000_000))]
    costs = [[(1, 1, 1, 2e6), (1, 1, 1, 9e5)], [(1, 1, 1, 9e5)]]
    return compare(
        [
            write_run("a", *on, rounds=costs, notes=first),
            write_run("b", *on, "seed=1", rounds=costs, notes=second),
            write_run("c", "jfat"),
        ]
    )


def test_measured_memory_by_hand(enforced):
    """Both seeds took 3 MB, one of them of 4 MB; nobody came closer to a limit than the 0.95 of 1 MB."""
    memory, plans = setting_tables(enforced.settings[0])[2:]
    assert [(column.group, column.heading) for column in memory.columns[1:]] == [
        ("Counted", "peak"),
        ("Measured", "peak"),
        ("Measured", "its limit"),
        ("", "of a limit, at most"),
    ]
    assert rows(memory) == (("FedProphet", "2.0 MB", "3.0 MB", "4.0 MB", "95.0 %"),)
    assert rows(plans) == (("FedProphet", PIECES, "2", "50.0 %"), ("FedProphet", "plain", "2", "50.0 %"))
    assert len([line for line in reading(enforced) if "it is also measured" in line]) == 1
    lines = {line["row"]: line for line in csv.DictReader(io.StringIO(csv_text(enforced)))}
    names = ("enforced_peak_mb", "enforced_limit_mb", "enforced_closest_percent", "plans")
    assert [lines["FedProphet"][name] for name in names] == ["3.000000", "4.000000", "95.0", f"{PIECES}: 2; plain: 2"]
    assert [lines["jFAT"][name] for name in names] == ["", "", "", ""]
    found = {row["label"]: row for row in document(enforced)["settings"][0]["rows"]}
    whole = {"peak_bytes": 3_000_000, "limit_bytes": 4_000_000, "closest": 0.95, "plans": {PIECES: 2, "plain": 2}}
    assert found["FedProphet"]["enforced"] == whole
    assert found["FedProphet"]["runs"][1]["enforced"] == {
        "peak_bytes": 3_000_000,
        "limit_bytes": 9_000_000,
        "closest": 1 / 3,
        "plans": {"plain": 1},
    }
    assert "enforced" not in found["jFAT"]
    assert f"| FedProphet | {PIECES} |     2 | 50.0 % |" in markdown(enforced)


def test_without_limits_nothing_is_said_of_measured_memory(comparison):
    assert not any(
        "measured" in table.title or "Plans" in table.title for table in setting_tables(comparison.settings[0])
    )
    assert not any("it is also measured" in line for line in reading(comparison))
    assert "enforced" not in csv_text(comparison)
    assert "enforced" not in json.dumps(document(comparison))


def test_without_baselines_there_is_no_table_of_rounds(write_run):
    assert len(setting_tables(compare([write_run("a", "fedprophet")]).settings[0])) == 2


def test_rows_attacked_with_different_steps_share_no_number_of_steps(write_run):
    setting = compare([write_run("a", "jfat"), write_run("b", "fedprophet", "evaluate.steps=50")]).settings[0]
    table = setting_tables(setting)[0]
    assert table.columns[3].heading == "PGD"
    assert [row[3] for row in rows(table)] == ["50.0", "50.0"]


def test_markdown(comparison):
    text = markdown(comparison, "comparison.png")
    assert "![Accuracies and simulated time of each method](comparison.png)" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) == (2 + 3) + (2 + 3) + (2 + 1)
    assert {line.count("|") for line in tables[:5]} == {9}
    assert len({len(line) for line in tables[:5]}) == 1, "columns are aligned in the text"
    cells = [cell.strip() for cell in tables[7].split("|")[1:-1]]
    assert cells[0] == "jFAT"
    assert cells[4] == "30.0 ± 14.1 s"
    assert "| Speed-up over jFAT |" in text
    assert "- Made with fedprophet 0.1.0." in text
    assert "](" not in markdown(comparison)


def test_rows_with_letters_are_short_in_markdown_and_whole_in_csv(write_run):
    many = ("norm.layers=local", "train.proximal=0.25", "evaluate.every=1")
    found = compare([write_run("a"), write_run("b", "jfat", *many), write_run("c", "jfat", "train.batch=7")])
    text = markdown(found)
    first = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| jFAT")}
    assert first == {"jFAT", "jFAT a", "jFAT (train.batch=7)"}
    assert text.count("train.proximal=0.25") == 1
    assert "- Runs of jFAT a: " in text
    line = next(line for line in csv.DictReader(io.StringIO(csv_text(found))) if line["name"] == "jFAT a")
    assert line["row"] == 'jFAT (train.proximal=0.25, norm.layers="local", evaluate.every=1)'


def test_a_bar_in_a_value_does_not_break_the_table(write_run):
    paths = [write_run("a", "jfat", "fleet.pool=x"), write_run("b", "jfat", 'model.weights="a|b"', "fleet.pool=x")]
    line = next(line for line in markdown(compare(paths)).splitlines() if "a\\|b" in line)
    assert line.replace("\\|", "").count("|") == 9


def test_csv(comparison):
    text = csv_text(comparison)
    assert "\r" not in text
    jfat, rbn, ours = csv.DictReader(io.StringIO(text))
    expected = {
        "row": "jFAT",
        "method": "jfat",
        "seeds": "0 1",
        "personalised_clean_percent": "85.0",
        "personalised_clean_deviation": "7.1",
        "personalised_clean_samples": "100 100",
        "personalised_pgd_attack": "pgd20",
        "personalised_aa_percent": "30.0",
        "personalised_aa_attack": "autoattack",
        "global_clean_percent": "42.5",
        "best_round": "1",
        "best_adversarial_percent": "40.0",
        "last_clean_percent": "60.0",
        "least_memory_mb": "3.000000",
        "total_s": "30.000",
        "computation_s": "5.000",
        "access_s": "25.000",
        "communication_s": "2.000",
        "speedup_over_jfat": "1.000",
        "versions": "0.1.0",
    }
    assert {name: jfat[name] for name in expected} == expected
    assert (ours["total_s"], ours["speedup_over_jfat"], ours["speedup_over_row"]) == ("12.000", "2.500", "jFAT")
    assert (ours["personalised_aa_percent"], ours["best_round"], ours["peak_memory_mb"]) == ("", "", "7.000000")
    assert (rbn["finished"], rbn["personalised_clean_percent"], rbn["total_s"]) == ("false", "", "2.000")


def test_json(comparison):
    answer = json.loads(json.dumps(document(comparison), allow_nan=False))
    assert list(answer) == ["settings", "reading", "notes"]
    jfat, rbn, ours = answer["settings"][0]["rows"]
    assert jfat["personalised"]["clean"] == {
        "value": {"mean": pytest.approx(0.85), "deviation": pytest.approx(0.0707107), "count": 2},
        "attack": "clean",
        "samples": [100, 100],
        "precisions": [],
    }
    assert jfat["simulated_s"]["total"]["mean"] == 30
    assert [run["simulated_s"]["total"] for run in jfat["runs"]] == [20, 40]
    assert jfat["runs"][0]["best"] == REACHED["best"]
    assert jfat["runs"][1]["personalised"]["autoattack"] == {
        "accuracy": 0.35, "samples": 50, "interval": None, "precision": None
    }  # fmt: skip
    assert ours["memory_bytes"] == {"least": 1_000_000, "peak": 7_000_000}
    assert ours["speedup"] == {"factor": 2.5, "over": "jFAT"}
    assert ours["personalised"]["aa"] is None
    assert (rbn["finished"], rbn["speedup"]) == (False, None)
    assert rbn["memory_bytes"] == {"least": 4_000_000, "peak": 4_000_000}


def test_the_same_runs_give_the_same_text(comparison):
    again = compare([run.path for run in comparison.settings[0].runs])
    assert markdown(again) == markdown(comparison)
    assert csv_text(again) == csv_text(comparison)
