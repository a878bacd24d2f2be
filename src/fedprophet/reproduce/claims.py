"""What the paper says about its numbers, as sentences that can be checked against ours."""

from collections.abc import Iterable

from fedprophet.reproduce.findings import Claim, Part, printed

NEAR = 5.0
"""Points of accuracy that still count as comparable."""
LESS_MEMORY = ("FedDF-AT", "FedET-AT", "HeteroFL-AT", "FedDrop-AT", "FedRolex-AT", "FedRBN")
SMALL_MU, LARGE_MU = ("0", "1e-7", "1e-6", "1e-5"), "1e-3"
MEMORY, DEVICES = "memory", "devices"
"""The two halves of Figure 6."""
SHARES = ("0.2", "0.4", "0.6", "0.8", "1.0")


def _each(part: Part, rows: Iterable[str], quantity: str) -> list[float]:
    return [part(row, quantity) for row in rows]


def same_as_printed(experiment: str, tolerance: float, text: str) -> Claim:
    """Return the claim that all numbers are the printed ones."""

    def check(part: Part) -> bool:
        paper = printed(experiment, part.paper)
        return set(part.values) == set(paper.values) and all(
            abs(part(row, name) - number.mean) < tolerance
            for row, numbers in paper.values.items()
            for name, number in numbers.items()
        )

    return Claim(text, check)


TABLE1 = (
    Claim(
        "the large model is more accurate and more robust than the small one",
        lambda p: p("large", "clean") > p("small", "clean") and p("large", "PGD") > p("small", "PGD"),
    ),
    Claim(
        "partial training of the large model is less accurate and less robust than training it whole",
        lambda p: all(p("large, partial training", name) < p("large", name) for name in ("clean", "PGD")),
    ),
)
FIGURE2 = (
    Claim(
        "with swapping, storage access takes most of the time",
        lambda p: p("limited, with swapping", "access") > p("limited, with swapping", "computation"),
    ),
    Claim(
        "a sub-network that fits takes less time than swapping",
        lambda p: p("limited, a sub-network", "total") < p("limited, with swapping", "total"),
    ),
)
FIGURE6 = (
    Claim(
        "R_min is 80 % below R_max, to a percent, and every module fits it",
        lambda p: all(
            79 <= p(row, "reduction") <= 81 and p(row, "largest module") <= p(row, "R_min") for row in p.values
        ),
        MEMORY,
    ),
    Claim(
        "the unbalanced fleet has less performance available (median)",
        lambda p: p("unbalanced", "performance") < p("balanced", "performance"),
        DEVICES,
    ),
    Claim(
        "the unbalanced fleet has less memory available (median)",
        lambda p: p("unbalanced", "memory") < p("balanced", "memory"),
        DEVICES,
    ),
)
TABLE2 = (
    Claim(
        "FedProphet is the most robust (PGD) of the methods that need less memory than jFAT",
        lambda p: p("FedProphet", "PGD") > max(_each(p, LESS_MEMORY, "PGD")),
    ),
    Claim(
        f"FedProphet is at most {NEAR:g} points below jFAT, clean and under PGD",
        lambda p: all(p("FedProphet", name) > p("jFAT", name) - NEAR for name in ("clean", "PGD")),
    ),
    Claim(
        "FedRBN has the highest clean accuracy, and is less robust than FedProphet",
        lambda p: (
            p("FedRBN", "clean") >= max(_each(p, (*LESS_MEMORY, "jFAT", "FedProphet"), "clean"))
            and p("FedRBN", "PGD") < p("FedProphet", "PGD")
        ),
    ),
)
FIGURE7 = (
    Claim("FedProphet takes less time than jFAT", lambda p: p("FedProphet", "time") < p("jFAT", "time")),
    Claim(
        "jFAT has more storage access than any other method",
        lambda p: p("jFAT", "access") > max(_each(p, (*LESS_MEMORY, "FedProphet"), "access")),
    ),
    Claim(
        "the methods that cut channels or distil compute for longer than jFAT, as they have more rounds",
        lambda p: min(_each(p, LESS_MEMORY[:-1], "computation")) > p("jFAT", "computation"),
    ),
)
FIGURE8 = (
    Claim(
        f"up to mu = 1e-5 robustness changes little (at most {NEAR:g} points of PGD)",
        lambda p: max(_each(p, SMALL_MU, "PGD")) - min(_each(p, SMALL_MU, "PGD")) <= NEAR,
    ),
    Claim(
        "with a large mu (1e-3) an attack moves the output of module 1 less than with none",
        lambda p: p(LARGE_MU, "Δz_1") < p("0", "Δz_1"),
    ),
    Claim("a large mu (1e-3) is less robust than 1e-5", lambda p: p(LARGE_MU, "PGD") < p("1e-5", "PGD")),
)
FIGURE9 = (
    Claim(
        "with more memory there are fewer modules, and one in the end",
        lambda p: (
            _each(p, SHARES, "modules") == sorted(_each(p, SHARES, "modules"), reverse=True)
            and p("1.0", "modules") == 1
        ),
    ),
    Claim(
        f"accuracy hardly depends on the number of modules (at most {NEAR:g} points, clean and under PGD)",
        lambda p: all(max(_each(p, SHARES, n)) - min(_each(p, SHARES, n)) <= NEAR for n in ("clean", "PGD")),
    ),
)
TABLE3 = (
    Claim(
        "without APA the model is more accurate and less robust",
        lambda p: p("no APA", "clean") > p("APA and DMA", "clean") and p("no APA", "PGD") < p("APA and DMA", "PGD"),
    ),
    Claim(
        "without DMA it is less accurate and less robust",
        lambda p: all(p("no DMA", name) < p("APA and DMA", name) for name in ("clean", "PGD")),
    ),
)
FIGURE10 = (
    Claim(
        "alpha rises in the stages: it ends none of them below its first value, and at least one above it",
        lambda p: all(change >= 0 for change in _rises(p)) and any(change > 0 for change in _rises(p)),
    ),
)
TABLE4 = (
    Claim(
        "assignment costs hardly any time: at most 5 % more",
        lambda p: p("with DMA", "time") <= 1.05 * p("without DMA", "time"),
    ),
)


def _rises(part: Part) -> list[float]:
    rows = [row for row in part.values if row != "module 1"]
    return [part(row, "alpha, last") - part(row, "alpha, first") for row in rows]
