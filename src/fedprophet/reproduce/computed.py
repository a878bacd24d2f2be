"""Experiments that need no training: costs, partitions, devices, and training time by the simulated clock."""

import statistics
from collections.abc import Callable, Iterator, Mapping

from fedprophet.bench.synthetic import sizes_of
from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.channels import first_channels, kept_channels
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.narrow import narrow_chain
from fedprophet.config.config import Config
from fedprophet.durations import format_duration
from fedprophet.fleet.availability import draw_device
from fedprophet.fleet.device import load_pool
from fedprophet.fleet.latency import local_time, workload_of
from fedprophet.messages.values import Resources
from fedprophet.models import build
from fedprophet.report.compare import Statistic
from fedprophet.reproduce.claims import DEVICES, MEMORY
from fedprophet.reproduce.clock import STILL, round_time
from fedprophet.reproduce.findings import Curve, Part, Values, one
from fedprophet.reproduce.paper import numbers_of
from fedprophet.reproduce.readings import model_cost, model_modules
from fedprophet.reproduce.runs import Setup, Variant, finished
from fedprophet.reproduce.scales import PAPER, PaperSetting
from fedprophet.sizes import parse_budget

MB, GB, GIGA, TERA = 1e6, 1e9, 1e9, 1e12
WHOLE = Variant("jfat", "jfat")
FIGURE2_DEVICE = "TX2"
"""The one device that is in both of the paper's pools; the paper does not say which one it drew."""
ROUND = 1
CASCADE = Variant("fedprophet", "fedprophet")
ALONE = Variant("fedprophet-no-dma", "fedprophet", ("assignment.enabled=false",))
OF_THE_CASCADE, OF_SUBNETWORKS = 50, 30
OF_JOINT_TRAINING = 500
"""Rounds (of a stage) that the clock plays: a mean of so many. Each sub-network has to be built to be counted."""
ROWS = ("jFAT", "FedDF-AT", "FedET-AT", "HeteroFL-AT", "FedDrop-AT", "FedRolex-AT", "FedRBN", "FedProphet")
"""The methods in the paper's order."""
CLOCKED: Mapping[str, tuple[Variant, int]] = {
    "jFAT": (WHOLE, OF_JOINT_TRAINING),
    "FedDF-AT": (Variant("feddf", "feddf"), OF_THE_CASCADE),
    "HeteroFL-AT": (Variant("heterofl", "heterofl"), OF_SUBNETWORKS),
    "FedRBN": (Variant("fedrbn", "fedrbn"), OF_THE_CASCADE),
    "FedProphet": (CASCADE, OF_THE_CASCADE),
}
ASSIGNED: Mapping[str, Variant] = {"with DMA": CASCADE, "without DMA": ALONE}
AS_LONG_AS = {"FedET-AT": "FedDF-AT", "FedDrop-AT": "HeteroFL-AT", "FedRolex-AT": "HeteroFL-AT"}
"""Methods whose clients train something of the same size as those of another, in every round."""


def _balanced(paper: Setup) -> Iterator[tuple[str, PaperSetting, Config]]:
    """Yield the paper's two models: the dataset's name, a setting that has it, and its configuration."""
    for setting in PAPER.settings:
        if setting.on_balanced_fleet:
            yield setting.label.removesuffix(" balanced"), setting, paper.config(setting, CASCADE)


# Tables 5 to 8 -------------------------------------------------------------------------------------------------------


def devices(part: str) -> Callable[[Setup], Iterator[Part]]:
    """Return what reads the pool of a dataset."""

    def compute(paper: Setup) -> Iterator[Part]:
        config = next(config for label, _, config in _balanced(paper) if label == part)
        values = {
            device.name: {
                "performance": one(device.performance / TERA),
                "memory": one(device.memory / GB),
                "bandwidth": one(device.bandwidth / GB),
            }
            for device in load_pool(config.fleet.pool).devices
        }
        yield Part(part, part, values)

    return compute


def modules_of(part: str, dataset: str) -> Callable[[Setup], Iterator[Part]]:
    """Return what cuts the model of a dataset into modules."""

    def compute(paper: Setup) -> Iterator[Part]:
        config = next(config for label, _, config in _balanced(paper) if label == dataset)
        cost = model_cost(config)
        yield Part(part, part, _module_values(cost, config))

    return compute


def _module_values(cost: ChainCost, config: Config) -> Values:
    return {
        f"module {module.index + 1}": {
            "layers": one(sum(len(atom.layers) for atom in cost.atoms[module.first : module.last])),
            "memory": one(module.memory / MB),
            "FLOPs": one(module.flops / GIGA),
        }
        for module in model_modules(config, cost)
    }


# Figures 2 and 6 -----------------------------------------------------------------------------------------------------


def overhead(paper: Setup) -> Iterator[Part]:
    """Figure 2: one client's round with enough memory, with a fifth of it and swapping, and with a sub-network."""
    for label, _, config in _balanced(paper):
        cost = model_cost(config)
        reserve = parse_budget(config.memory.budget, cost.total_memory)
        device = next(d for d in load_pool(config.fleet.pool).devices if d.name == FIGURE2_DEVICE)
        trained = {
            "sufficient memory": (cost, device.memory),
            "limited, with swapping": (cost, reserve),
            "limited, a sub-network": (_narrowed(config, reserve / cost.total_memory), reserve),
        }
        values = {
            row: _round_seconds(config, part, Resources(memory, device.performance, device.bandwidth))
            for row, (part, memory) in trained.items()
        }
        yield Part(f"{config.model.name} on {label}", label, values)


def _narrowed(config: Config, width: float) -> ChainCost:
    """Return the cost of a sub-network of a width, as FedRolex trains it."""
    sizes = sizes_of(config.data)
    chain = chain_of(build(config.model.name, sizes.shape, sizes.classes))
    channels = channels_of(chain.model, sizes.shape)
    narrow = narrow_chain(chain, channels, kept_channels(channels, width, first_channels))
    return cost_of(narrow, sizes.shape, config.train.batch, sizes.classes, config.train.copies)


def _round_seconds(config: Config, cost: ChainCost, resources: Resources) -> dict[str, Statistic]:
    batches = [config.train.batch] * config.train.iterations
    time = local_time(workload_of(cost), resources, batches, config.attack.steps)
    return {"computation": one(time.computation), "access": one(time.access), "total": one(time.total)}


def samplings(paper: Setup) -> Iterator[Part]:
    """Figure 6: what clients have available in a round on both fleets, and the memory of training."""
    for label, setting, config in _balanced(paper):
        cost = model_cost(config)
        reserve = parse_budget(config.memory.budget, cost.total_memory)
        fleets = {w.label.removeprefix(f"{label} "): w for w in PAPER.settings if w.balanced == setting.balanced}
        curves = [_available(name, paper.config(fleet, CASCADE), reserve) for name, fleet in fleets.items()]
        medians = {
            curve.label: {
                "performance": one(statistics.median(curve.y)),
                "memory": one(statistics.median(curve.x)),
            }
            for curve in curves
        }
        yield Part(f"{label}, {DEVICES}", "", medians, tuple(curves))
        yield Part(f"{label}, {MEMORY}", label, {config.model.name: _memory(config, cost, reserve)})


def _memory(config: Config, cost: ChainCost, reserve: int) -> dict[str, Statistic]:
    modules = model_modules(config, cost)
    return {
        "R_max": one(cost.total_memory / MB),
        "R_min": one(reserve / MB),
        "largest module": one(max(module.memory for module in modules) / MB),
        "modules": one(len(modules)),
        "reduction": one(100 * (1 - reserve / cost.total_memory)),
    }


def _available(label: str, config: Config, reserve: int) -> Curve:
    """Return the available memory in MB and performance in TFLOPS of all clients in a round."""
    pool, fleet = load_pool(config.fleet.pool), config.fleet
    found = [
        fleet.resources(draw_device(pool, config.seed, client, fleet.exponent), config.seed, ROUND, client, reserve)
        for client in range(config.population.clients)
    ]
    return Curve(label, tuple(r.memory / MB for r in found), tuple(r.performance / TERA for r in found))


# Figure 7 and Table 4: time ------------------------------------------------------------------------------------------


def clocked(paper: Setup, setting: PaperSetting, variant: Variant, rounds: int) -> dict[str, float]:
    """Return the simulated time of a run: that of a finished one, else the clock's for all rounds that it may have."""
    done = next(finished(run for run in paper.planned(setting, variant)[:1] if not run.apart), None)
    if done and done.summary.time:
        time, played = done.summary.time, done.summary.rounds
        return {"computation": time.computation, "access": time.access, "time": time.total, "rounds": played}
    mean = round_time(paper.config(setting, variant, more=STILL), rounds)
    parts = {"computation": mean.computation, "access": mean.access, "time": mean.total}
    return {**{name: seconds * mean.rounds for name, seconds in parts.items()}, "rounds": mean.rounds}


def training_times(paper: Setup, setting: PaperSetting) -> Part:
    """Figure 7: the time of every method, and the speed-up over jFAT."""
    found = {row: clocked(paper, setting, *how) for row, how in CLOCKED.items()}
    found |= {row: found[other] for row, other in AS_LONG_AS.items()}
    longest = found["jFAT"]["time"]
    values = {
        row: {name: one(value) for name, value in {**found[row], "speed-up": longest / found[row]["time"]}.items()}
        for row in ROWS
    }
    note = _rounds_note(values["FedProphet"], setting)
    return Part(setting.label, setting.paper, values, notes=(note,) if note else ())


def _rounds_note(cascade: Mapping[str, Statistic], setting: PaperSetting) -> str:
    """Say how many of our rounds the paper's time of FedProphet is: its stages ended when they had converged."""
    printed = numbers_of("figure7", setting.paper).get("FedProphet", {}).get("time")
    if printed is None:
        return ""
    seconds, rounds = cascade["time"].mean / cascade["rounds"].mean, cascade["rounds"].mean
    return (
        f"{setting.label}: FedProphet takes {format_duration(seconds)} a round here, so the paper's "
        f"{printed.value:,.0f} s are about {printed.value / seconds:.0f} of the {rounds:.0f} rounds counted: its "
        "stages ended when they had converged."
    )


def assignment_times(paper: Setup, setting: PaperSetting) -> Part:
    """Table 4: the time of FedProphet with and without module assignment."""
    found = {row: clocked(paper, setting, variant, OF_THE_CASCADE) for row, variant in ASSIGNED.items()}
    values = {row: {name: one(value) for name, value in times.items()} for row, times in found.items()}
    return Part(setting.label, setting.paper, values)
