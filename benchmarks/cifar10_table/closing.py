"""What finished cells have reached, in a few lines for whoever has played them."""

from collections.abc import Iterator, Mapping
from typing import Any

from cifar10_table.columns import accuracies, autoattack, spreads, wall_clock, which_round
from fedprophet.display.numbers import NONE, percent
from fedprophet.report.runs import ReadFolder
from fedprophet.runs.evaluator import KINDS


def closing_lines(name: str, run: ReadFolder) -> Iterator[str]:
    """Yield a line on a finished run, and for a cascade one on its modules."""
    attack = f"pgd{run.summary.config.evaluate.steps}"
    facts: dict[str, str] = {
        **{kind: spreads([run], accuracies(kind, "clean", attack)) for kind in KINDS},
        "AutoAttack": autoattack([run]),
        "best round": which_round([run]) or NONE,
        "wall clock": wall_clock([run]) or NONE,
    }
    steps = f"clean / PGD-{run.summary.config.evaluate.steps} in %"
    yield f"{name} ({steps}): " + "; ".join(f"{fact} {text}" for fact, text in facts.items() if text)
    modules = [module_text(record["fixed"]) for record in run.records if "fixed" in record]
    if modules:
        yield f"{name}, by module: {'; '.join(modules)}"


def module_text(fixed: Mapping[str, Any]) -> str:
    """Return a module's number, its accuracies where they were measured, and the alpha that it was kept with."""
    clean, attacked = (percent(fixed[measure]).removesuffix(" %") for measure in ("clean", "adversarial"))
    alpha = fixed["alpha"]
    return f"{fixed['module']}: {clean} / {attacked}" + ("" if alpha is None else f", alpha {alpha:.2f}")
