"""The experiments, in the order of the paper: each table and figure of its evaluation under its own number."""

from collections.abc import Mapping

from fedprophet.reproduce import claims, drawing
from fedprophet.reproduce.computed import (
    ALONE,
    ASSIGNED,
    CASCADE,
    CLOCKED,
    FIGURE2_DEVICE,
    OF_JOINT_TRAINING,
    OF_SUBNETWORKS,
    OF_THE_CASCADE,
    assignment_times,
    devices,
    modules_of,
    overhead,
    samplings,
    training_times,
)
from fedprophet.reproduce.experiment import Clocked, Computed, Experiment, Trained
from fedprophet.reproduce.findings import Quantity
from fedprophet.reproduce.readings import (
    accuracy,
    best_clean,
    best_pgd,
    first_magnitude,
    modules,
    perturbation_curve,
    smallest_task,
    stages,
)
from fedprophet.reproduce.runs import Variant

CLEAN, PGD = Quantity("clean", "%"), Quantity("PGD", "%")
GLOBAL_CLEAN, GLOBAL_PGD = Quantity("global clean", "%"), Quantity("global PGD", "%")
SECONDS = "{:,.0f}"
ACCURACIES = {"clean": best_clean, "PGD": best_pgd}
TRAINED = {"trained clean": accuracy("personalised", "clean"), "trained PGD": accuracy("personalised", "pgd")}
TRAINED_ACCURACIES = tuple(Quantity(name, "%") for name in TRAINED)
GLOBAL = {"global clean": accuracy("global", "clean"), "global PGD": accuracy("global", "pgd")}
JOINT = Variant("jfat", "jfat", fleet_free=True)
ROLEX = Variant("fedrolex", "fedrolex")
BEST_ROUND = (
    "Clean and PGD are personalised accuracies of the best round by clean + 1.5 · PGD, chosen on the reported data, as "
    "in the paper's tables; of a cascade it may be one of an earlier module. Trained is the same measure of the model "
    "that a run ends with, global that model, exported, on the test set."
)
METHODS: Mapping[str, Variant] = {
    "jFAT": JOINT,
    "FedDF-AT": Variant("feddf", "feddf"),
    "FedET-AT": Variant("fedet", "fedet"),
    "HeteroFL-AT": Variant("heterofl", "heterofl"),
    "FedDrop-AT": Variant("feddrop", "feddrop"),
    "FedRolex-AT": ROLEX,
    "FedRBN": Variant("fedrbn", "fedrbn"),
    "FedProphet": CASCADE,
}
STRONG_CONVEXITY = {
    mu: CASCADE if mu == "1e-5" else Variant(f"fedprophet-mu-{mu}", "fedprophet", (f"train.strong_convexity={mu}",))
    for mu in ("0", "1e-7", "1e-6", "1e-5", "1e-4", "1e-3")
}
BUDGETS = {
    "0.2": CASCADE,
    **{
        f"0.{tenths}": Variant(f"fedprophet-budget-{tenths}0", "fedprophet", (f"memory.budget={tenths}0%",))
        for tenths in (4, 6, 8)
    },
    "1.0": JOINT,
}
NO_APA = "perturbation.enabled=false"
ABLATION = {
    "APA and DMA": CASCADE,
    "no APA": Variant("fedprophet-no-apa", "fedprophet", (NO_APA,)),
    "no DMA": Variant(ALONE.name, ALONE.method, ALONE.changes, fleet_free=True),
    "neither": Variant("fedprophet-no-apa-no-dma", "fedprophet", (NO_APA, *ALONE.changes), fleet_free=True),
}
CLOCK_NOTE = (
    f"Simulated without training: cohorts, devices and assignments of seed 0, {OF_JOINT_TRAINING} rounds of jFAT, "
    f"{OF_SUBNETWORKS} of the methods that cut channels, {OF_THE_CASCADE} of the others (of each stage), times "
    "the rounds that a run has. Finished runs at scale paper, with the settings asked for, take the place of this."
)
ALL_ROUNDS = "All rounds of every stage count here, while in the paper's runs stages end when they have converged."


EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table1",
            "Small and large models",
            "why large models: a small one, a large one, and a large one by partial training",
            Trained(
                {
                    "small": Variant("jfat-small-model", "jfat", ("model.name={small_model}", "model.weights="), True),
                    "large": JOINT,
                    "large, partial training": ROLEX,
                },
                {**ACCURACIES, "memory": smallest_task, **TRAINED, **GLOBAL},
            ),
            (CLEAN, PGD, Quantity("memory", "MB", "{:.3g}"), *TRAINED_ACCURACIES, GLOBAL_CLEAN, GLOBAL_PGD),
            drawing.bars("clean", "PGD"),
            claims.TABLE1,
            notes=(
                BEST_ROUND,
                "Memory is that of the smallest task that a client was given; the paper says 1 × and 5 ×.",
            ),
        ),
        Experiment(
            "figure2",
            "Local training overhead",
            "computation and storage access of one client's round: enough memory, swapping, a sub-network",
            Computed(overhead),
            tuple(Quantity(name, "s", "{:.2f}") for name in ("computation", "access", "total")),
            drawing.stacked("computation", "access"),
            claims.FIGURE2,
            notes=(
                f"30 full batches and 10 attack steps on a {FIGURE2_DEVICE} at its peak (in both pools); limited is "
                "R_min. The figure prints no numbers and does not say which device it is.",
            ),
        ),
        Experiment(
            "figure6",
            "Device samplings and memory",
            "what clients have available on both fleets, and the memory of jFAT and FedProphet",
            Computed(samplings),
            (
                Quantity("R_max", "MB"),
                Quantity("R_min", "MB"),
                Quantity("largest module", "MB"),
                Quantity("modules", form="{:.0f}"),
                Quantity("reduction", "%"),
                Quantity("performance", "TFLOPS", "{:.2f}"),
                Quantity("memory", "MB", "{:.0f}"),
            ),
            drawing.points_or(
                "available memory in MB", "available performance in TFLOPS", drawing.bars("R_max", "R_min")
            ),
            claims.FIGURE6,
            notes=("Devices: medians of what 100 clients have available in round 1, seed 0.",),
        ),
        Experiment(
            "table2",
            "Accuracy and robustness of all methods",
            "the main table: eight methods, clean, under PGD and under AutoAttack",
            Trained(
                METHODS,
                {**ACCURACIES, "AA": accuracy("personalised", "autoattack"), **TRAINED, **GLOBAL},
                unbalanced=True,
            ),
            (CLEAN, PGD, Quantity("AA", "%"), *TRAINED_ACCURACIES, GLOBAL_CLEAN, GLOBAL_PGD),
            drawing.bars("clean", "PGD", "AA"),
            claims.TABLE2,
            attacks=("autoattack",),
            notes=(BEST_ROUND, "AutoAttack is that of the trained model. jFAT trains alike on both fleets."),
        ),
        Experiment(
            "figure7",
            "Training time of all methods",
            "simulated time of a whole run, computation and storage access, and the speed-up over jFAT",
            Clocked(training_times, {row: variant for row, (variant, _) in CLOCKED.items()}),
            (
                Quantity("time", "s", SECONDS),
                Quantity("speed-up", "×", "{:.2f}"),
                Quantity("computation", "s", SECONDS),
                Quantity("access", "s", SECONDS),
                Quantity("rounds", form="{:.0f}"),
            ),
            drawing.stacked("computation", "access"),
            claims.FIGURE7,
            notes=(CLOCK_NOTE, ALL_ROUNDS, "The paper's time of jFAT is FedProphet's, times the printed speed-up."),
        ),
        Experiment(
            "figure8",
            "Strong convexity",
            "mu from 0 to 1e-3: robustness, and how far an attack moves the output of module 1",
            Trained(STRONG_CONVEXITY, {**ACCURACIES, "Δz_1": first_magnitude, **TRAINED}),
            (CLEAN, PGD, Quantity("Δz_1", "l2", "{:.3f}"), *TRAINED_ACCURACIES),
            drawing.lines("mu", "PGD", "Δz_1"),
            claims.FIGURE8,
            notes=(BEST_ROUND,),
        ),
        Experiment(
            "figure9",
            "Memory budget",
            "R_min from a fifth of R_max to all of it: modules, accuracy and robustness",
            Trained(BUDGETS, {"modules": modules, **ACCURACIES, **TRAINED}),
            (Quantity("modules", form="{:.0f}"), CLEAN, PGD, *TRAINED_ACCURACIES),
            drawing.lines("R_min / R_max", "clean", "PGD", "modules"),
            claims.FIGURE9,
            notes=(
                BEST_ROUND,
                "0.2 is the preset's own budget (25 % on digits, below which a layer does not fit); 1.0 is jFAT.",
            ),
        ),
        Experiment(
            "table3",
            "Ablation",
            "with and without Adaptive Perturbation Adjustment and Differentiated Module Assignment",
            Trained(ABLATION, {**ACCURACIES, **TRAINED, **GLOBAL}, unbalanced=True),
            (CLEAN, PGD, *TRAINED_ACCURACIES, GLOBAL_CLEAN, GLOBAL_PGD),
            drawing.bars("clean", "PGD"),
            claims.TABLE3,
            notes=(BEST_ROUND, "Without assignment a run is the same on both fleets."),
        ),
        Experiment(
            "figure10",
            "Perturbation over rounds",
            "the perturbation per dimension in every round, and alpha at the ends of each stage",
            Trained({"FedProphet": CASCADE}, {}, tables=stages, curves=(perturbation_curve,)),
            (
                Quantity("rounds", form="{:.0f}"),
                Quantity("alpha, first", form="{:.2f}"),
                Quantity("alpha, last", form="{:.2f}"),
                Quantity("magnitude, first", form="{:.4f}"),
                Quantity("magnitude, last", form="{:.4f}"),
            ),
            drawing.curves("round", "perturbation per dimension"),
            claims.FIGURE10,
            notes=(
                "Per dimension: the l2 radius divided by the root of the number of features; on images, in the first "
                "stage, the l_inf radius. Of the first seed.",
            ),
        ),
        Experiment(
            "table4",
            "Training time without module assignment",
            "simulated time of FedProphet with and without Differentiated Module Assignment",
            Clocked(assignment_times, ASSIGNED),
            (
                Quantity("time", "s", SECONDS),
                Quantity("computation", "s", SECONDS),
                Quantity("access", "s", SECONDS),
                Quantity("rounds", form="{:.0f}"),
            ),
            drawing.bars("time"),
            claims.TABLE4,
            notes=(CLOCK_NOTE, ALL_ROUNDS),
        ),
        *(
            Experiment(
                name,
                f"Devices for {part}",
                f"the pool that clients of {part} are drawn from",
                Computed(devices(part)),
                (
                    Quantity("performance", "TFLOPS", "{:.1f}"),
                    Quantity("memory", "GB", "{:.0f}"),
                    Quantity("bandwidth", "GB/s", "{:.1f}"),
                ),
                drawing.bars("performance", "memory", "bandwidth"),
                (claims.same_as_printed(name, 1e-9, "the pool that ships is the paper's"),),
            )
            for name, part in (("table5", "CIFAR-10"), ("table6", "Caltech-256"))
        ),
        *(
            Experiment(
                name,
                f"Partition of {part.partition(',')[0]}",
                f"the modules of {part}: layers, memory and forward FLOPs of each",
                Computed(modules_of(part, dataset)),
                (
                    Quantity("layers", form="{:.0f}"),
                    Quantity("memory", "MB", "{:.2f}"),
                    Quantity("FLOPs", "G", "{:.2f}"),
                ),
                drawing.bars("memory"),
                (claims.same_as_printed(name, 0.1, "every number is the paper's, within its last printed digit"),),
                notes=(f"The paper prints {rounded}.",),
            )
            for name, part, dataset, rounded in (
                ("table7", "VGG16, R_min = 60 MB", "CIFAR-10", "6.0 for 6.05 G"),
                ("table8", "ResNet34, R_min = 224 MB", "Caltech-256", "148.6 for 148.65 MB"),
            )
        ),
    )
}
