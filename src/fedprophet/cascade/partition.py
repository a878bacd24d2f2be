"""Algorithm 1: cut a chain of atoms into modules that each train within a memory budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedprophet.cascade.cost import ChainCost
from fedprophet.errors import BudgetError
from fedprophet.sizes import format_size


@dataclass(frozen=True)
class Module:
    """Atoms `first` … `last` − 1, trained together: memory and FLOPs with the auxiliary head, parameters without."""

    index: int
    first: int
    last: int
    memory: int
    flops: int
    parameters: int


def smallest_budget(cost: ChainCost) -> tuple[int, int]:
    """Return the smallest budget in bytes that a partition exists for, and the index of the atom that needs it."""
    needs = [cost.memory(atom, atom + 1) for atom in range(len(cost.atoms))]
    need = max(needs)
    return need, needs.index(need)


def partition(cost: ChainCost, budget: int, enough: Callable[[], int] = int) -> tuple[Module, ...]:
    """Return the modules of Algorithm 1: each takes atoms for as long as they fit the budget.

    A model that fits as a whole is one module: it needs no auxiliary head, which Algorithm 1 would count on the way.
    `enough` is what else needs a budget of that size; it is asked for the budget that an error names.
    """
    if cost.total_memory <= budget:
        return (_module(cost, 0, 0, len(cost.atoms)),)
    need, largest = smallest_budget(cost)
    if budget < need:
        atom = cost.atoms[largest]
        raise BudgetError(
            f"a budget of {budget} bytes ({format_size(budget)}) is too small: atom {atom.label} "
            f"needs {need} bytes ({format_size(need)}) for a batch of {cost.batch} and cannot be cut further. "
            f"The smallest budget that works is {max(min(need, cost.total_memory), enough())} bytes"
            f"{'; a smaller batch lowers it' if cost.batch > 1 else ''}"
        )
    return modules_of(cost, _spans(cost, budget, 0, len(cost.atoms)))


def cut_further(modules: Sequence[Module], cost: ChainCost, needs: ChainCost, budget: int) -> tuple[Module, ...]:
    """Return the modules of a cost, those that need more than the budget cut by Algorithm 1 with what they need.

    It goes over the atoms of such a module alone, so that the others stay as they are. An atom that needs more than the
    budget on its own is a module on its own.
    """

    def spans(module: Module) -> list[tuple[int, int]]:
        first, last = module.first, module.last
        fits = last - first == 1 or needs.memory(first, last) <= budget
        return [(first, last)] if fits else _spans(needs, budget, first, last)

    return modules_of(cost, [span for module in modules for span in spans(module)])


def _spans(cost: ChainCost, budget: int, first: int, last: int) -> list[tuple[int, int]]:
    """Return where modules of atoms `first` … `last` − 1 begin and end: each takes atoms for as long as they fit."""
    starts = [first]
    for index in range(first + 1, last):
        if cost.memory(starts[-1], index + 1) > budget:
            starts.append(index)
    return list(pairwise([*starts, last]))


def modules_of(cost: ChainCost, spans: Iterable[tuple[int, int]]) -> tuple[Module, ...]:
    """Return the modules that begin and end where the spans of atoms do."""
    return tuple(_module(cost, index, first, last) for index, (first, last) in enumerate(spans))


def _module(cost: ChainCost, index: int, first: int, last: int) -> Module:
    return Module(index, first, last, cost.memory(first, last), cost.flops(first, last), cost.parameters(first, last))
