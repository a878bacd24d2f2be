"""The tables of the configuration that belong to no single package. Defaults are the paper's values where it gives one.

The other tables are defined beside the code that uses them: `fedprophet.settings.section` tells how.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from fedprophet.cascade.norms import NormLayers
from fedprophet.config.choices import reads
from fedprophet.server.perturbation import PerturbationSettings
from fedprophet.server.rules import RULES
from fedprophet.settings.describe import misfit
from fedprophet.settings.section import Section
from fedprophet.settings.toml import shown
from fedprophet.settings.values import Budget, Clients, Counts, OfClients, OneOf, Ratio, Rounds


class PopulationSettings(Section):
    """The clients, and how many take part in a round."""

    clients: int = Field(default=20, ge=1, le=10**7, description="Clients in the population (N; 100 in the paper).")
    cohort: Annotated[int, OfClients()] = Field(
        default=5, ge=1, description="Clients drawn for each round (C; 10 in the paper)."
    )


class MemorySettings(Section):
    """The memory that every client has available at any time."""

    budget: Budget = Field(
        default="25%",
        description="The paper's R_min, which every module must fit: a size, or a share of what training the whole "
        "model needs.",
    )
    model: Literal["paper", "measured"] = Field(
        default="paper",
        description="What FedProphet's modules and their assignment are counted by: the paper's model of memory, or "
        "the memory that the most economical way to train them is predicted to take, on a GPU where engine is cuda, "
        "and on a CPU otherwise.",
    )
    enforce: bool = Field(
        default=False,
        description="Whether clients train within the memory they have available: by a plan that takes less where it "
        "is needed, and in smaller modules where no plan fits. A client that takes more ends the run. On a CPU, a "
        "client then trains on one thread: memory is predicted for one.",
    )


class TrainSettings(Section):
    """Local training (Eq. 9 and 13)."""

    batch: int = Field(default=64, ge=1, le=10**6, description="Samples in a local batch (B).")
    iterations: int = Field(default=30, ge=1, le=10**6, description="Local SGD iterations of a client in a round (E).")
    learning_rate: float = Field(default=0.005, gt=0, description="Learning rate in the first round of a stage.")
    decay: float = Field(
        default=0.994, gt=0, le=1, description="Factor on the learning rate after each round of a stage."
    )
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="Momentum of SGD; 0 also saves its copy of the parameters."
    )
    weight_decay: float = Field(default=1e-4, ge=0, description="Weight decay of backbone and heads.")
    head_gradients: Literal["fresh", "summed"] = Field(
        default="fresh",
        description="The gradient that an auxiliary head steps along: its iteration's, or the sum of all in the round "
        "so far (as in the paper's runs: about 15 times the step).",
    )
    warmup: Rounds = Field(
        default="20%", description="Rounds of standard training that start a stage (100 of 500 in the paper)."
    )
    warmup_stages: Literal["all", "first"] = Field(
        default="all",
        description="FedProphet: the stages that start with them. A later stage begins behind modules that are robust "
        "already; training it without an attack gives that away, and the rest of the stage has to win it back.",
    )
    strong_convexity: float = Field(default=1e-5, ge=0, description="Weight of the strong-convexity term (mu).")
    calibration: Literal["none", "labels"] = Field(
        default="none",
        description="What a client adds to its class scores, in training, in attacks and in its own predictions: "
        "nothing, or the logarithm of its label frequencies (CalFAT), which "
        "stay with it. The exported model adds nothing.",
    )
    smoothing: float = Field(
        default=1.0,
        gt=0,
        description="Calibration: samples of each label that a client counts beside its own, so that a label it has "
        "never seen stays possible.",
    )
    proximal: float = Field(
        default=0.0,
        ge=0,
        description="Weight of half the squared distance to the parameters a client was sent (FedProx's μ).",
    )
    weighting: Literal["none", "boundary"] = Field(
        default="none",
        description="How much an attacked sample counts in the loss: all the same, or more the earlier the attack led "
        "it over the decision boundary (DBFAT, by GAIRAT's function of the steps).",
    )
    consistency: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL divergence from what the model a client was sent predicts for clean samples to "
        "what it predicts in training for the attacked ones (DBFAT's β).",
    )

    @property
    def copies(self) -> int:
        """How many tensors of a parameter's size training holds: parameter, gradient, and momentum if it is used."""
        return 3 if self.momentum > 0 else 2

    def conflicts(self, config: Any) -> Iterator[str]:
        if config.warmup_rounds >= config.rounds:
            yield misfit("train.warmup", self.warmup, f"fewer than rounds = {config.rounds}")

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.calibration == "none":
            yield "smoothing", 'train.calibration = "none"'
        if not config.warmup_rounds:
            yield "warmup_stages", f"train.warmup = {shown(self.warmup)}"
        if self.iterations == 1 and not config.memory.enforce:  # where memory is limited, it takes some
            yield "proximal", "train.iterations = 1"


class NormSettings(Section):
    """Norm layers that keep statistics, such as batch norms."""

    layers: NormLayers = Field(
        default="local",
        description='Where they live: "local", with each client (the paper, FedBN); "shared", averaged like everything '
        'else, variances pooled; "statistics-local", only the affine part is averaged; "frozen", shared, and the '
        "statistics are fixed after a part of each stage.",
    )
    frozen_after: Rounds = Field(
        default="50%",
        description='Rounds of a stage after which the statistics are fixed, with layers = "frozen"; a share is of one '
        "round at least.",
    )
    newcomers: Literal["auto", "initial", "average"] = Field(
        default="auto",
        description="What a client that has no layers of its own yet begins with: those of the untrained model "
        "(initial, as in the paper's runs), or the pooled ones of the clients that trained last, who then send theirs "
        "to the server (average). auto: initial with local layers, average with local statistics.",
    )
    refresh: Literal["none", "clean", "attacked"] = Field(
        default="none",
        description="Whether clients measure the statistics anew when the run ends, on clean or attacked images (clean "
        "ones where there is no attack); they are pooled into those of the exported model.",
    )
    refresh_after: Literal["run", "stage"] = Field(
        default="run", description="When that is done: at the end of the run, or also after each stage of fedprophet."
    )
    refresh_layers: Literal["together", "in-turn"] = Field(
        default="together",
        description="Whether one pass measures all layers, each behind layers that normalise by their batch, or a pass "
        "for each layer measures it behind those already renewed.",
    )
    refresh_clients: Clients = Field(default="all", description="Clients that measure.")

    @property
    def shares_statistics(self) -> bool:
        """Whether the server has the statistics."""
        return self.layers in ("shared", "frozen")

    @property
    def averages_for_newcomers(self) -> bool:
        """Whether clients without layers of their own get those of the others."""
        return self.newcomers == "average" or (self.newcomers == "auto" and self.layers == "statistics-local")

    def conflicts(self, config: Any) -> Iterator[str]:
        minimum = config.aggregate.minimum
        if self.refresh != "none" and isinstance(self.refresh_clients, int) and self.refresh_clients < minimum:
            yield misfit("norm.refresh_clients", self.refresh_clients, f"at least aggregate.minimum = {minimum}")
        at_stages = self.refresh_after == "stage" and reads(config.method, "norm.refresh_after")
        if at_stages and not self.shares_statistics:
            text = '"run", or "stage" with norm.layers = "shared" or "frozen" (else clients have their own statistics)'
            yield misfit("norm.refresh_after", self.refresh_after, text)
        if at_stages and self.refresh == "none":
            text = '"run", or "stage" with norm.refresh = "clean" or "attacked"'
            yield misfit("norm.refresh_after", self.refresh_after, text)
        # A share is one round at least: it fits any number of rounds, a trial run of one too.
        wrong = isinstance(self.frozen_after, int) and not 1 <= self.frozen_after < config.rounds
        if self.layers == "frozen" and wrong:
            text = f"at least 1 round and fewer than rounds = {config.rounds}"
            yield misfit("norm.frozen_after", self.frozen_after, text)

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.layers != "frozen":
            yield "frozen_after", f"norm.layers = {shown(self.layers)}"
        elif config.rounds == 1:
            yield "frozen_after", "rounds = 1"
        if self.refresh == "none":
            yield from ((key, 'norm.refresh = "none"') for key in ("refresh_layers", "refresh_clients"))


class AttackSettings(Section):
    """The attack that clients train against: PGD, l_inf on images, l2 on features."""

    radius: Ratio = Field(default=8 / 255, ge=0, le=1, description='eps_0 on images in [0, 1]; may be written "8/255".')
    step: Literal["auto"] | Annotated[Ratio, Field(gt=0, le=1)] = Field(
        default="auto", description='Step on images; "auto" is a quarter of the radius; may be written "2/255".'
    )
    steps: int = Field(default=10, ge=0, description="PGD steps on images; 0 trains without an attack.")
    feature_steps: int = Field(default=10, ge=0, description="PGD steps on features.")
    ramp: Rounds = Field(
        default=0,
        description="Rounds after the warm-up in which the radius on images grows to its full size (none in the "
        "paper); in FedProphet no score counts before that. A whole model whose norm layers are shared may stop "
        "learning when it meets all of it at once.",
    )

    @property
    def step_size(self) -> float:
        """The step on images as a number."""
        return self.radius / 4 if self.step == "auto" else self.step

    def conflicts(self, config: Any) -> Iterator[str]:
        left = config.rounds - config.warmup_rounds
        if config.ramp_rounds >= left > 0:
            text = f"fewer than rounds − train.warmup = {left}, or no round after it would meet the whole attack"
            yield misfit("attack.ramp", self.ramp, text)

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        gated = config.gate_rounds or not reads(config.method, "convergence.gate")  # else a round counts a round later
        if config.ramp_rounds == 1 and gated:
            yield "ramp", "a single round to grow in, which meets the whole attack"
        elif not config.ramp_rounds:
            yield "ramp", f"rounds = {config.rounds}, of which it is less than one"


class ConvergenceSettings(Section):
    """When a stage ends, and from when on its rounds count."""

    gate: Rounds = Field(
        default="5%", description="Rounds after the warm-up before score, patience and APA start (25 of 500)."
    )
    patience: Rounds = Field(
        default="10%", description="A stage ends when its best score is this many rounds old (50 of 500)."
    )
    patience_after: Literal["best", "alpha"] = Field(
        default="best",
        description="From where on these rounds are counted: the best score, or the last change of alpha if that came "
        "later. Else a stage may end before the effect of an adjustment can be seen.",
    )
    weight: Literal["ratio"] | Annotated[float, Field(ge=0)] = Field(
        default="ratio",
        description="Weight of the adversarial accuracy in the score of a stage, clean + weight · adversarial: C*/A* "
        "of the stage before (1 in the first), or a number, such as the 1.5 that the paper's tables choose rounds by. "
        "A stage gives a point of robustness away for that many points of clean accuracy.",
    )

    def conflicts(self, config: Any) -> Iterator[str]:
        left = config.rounds - config.warmup_rounds
        if config.gate_rounds >= left > 0:
            text = f"fewer than rounds − train.warmup = {left}, or no round could become a stage's best"
            yield misfit("convergence.gate", self.gate, text)

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if not config.of(PerturbationSettings).enabled:
            yield "patience_after", "perturbation.enabled = false"


class EvaluateSettings(Section):
    """Validation on the clients during training, and the test at the end."""

    every: int = Field(default=1, ge=1, description="Rounds from one evaluation to the next.")
    before_gate: int = Field(
        default=0,
        ge=0,
        description="FedProphet: the same as long as no score counts, which is until the gate; 0: as `every`. Nothing "
        "depends on these evaluations, so the model is the same whatever the value; only the best round of all, in "
        "results.json, is then the best of fewer. Baselines, whose best round may be any, keep to `every`.",
    )
    steps: int = Field(default=20, ge=1, description="PGD steps of the attack that is evaluated.")
    clients: Clients = Field(default="all", description="Clients that evaluate.")
    test_samples: int = Field(
        default=0, ge=0, description="Samples of the test set that the global accuracy is measured on; 0: all."
    )
    batch: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Samples attacked at a time; 0: up to train.batch, as the largest module's memory allows.",
    )


class AggregateSettings(Section):
    """How the server combines what clients have trained."""

    rule: Annotated[str, OneOf(lambda: {name: entry.help for name, entry in RULES.items()})] = Field(
        default="mean", description='The rule of aggregation; all but "mean" resist bad updates.'
    )
    minimum: int = Field(
        default=1,
        ge=1,
        description="Fewest usable updates that a round needs, or measurements that norm.refresh needs. With fewer, "
        "nothing is averaged, but the round still counts.",
    )
    horizon: Rounds = Field(
        default=0,
        description="Rounds that the model is averaged over which is evaluated, kept and exported; training goes on "
        "from the last round's. 0: nothing is averaged over rounds, as in the paper. Rounds count from where the whole "
        "attack is met on, in FedProphet in each stage anew; it may have no more rounds than those.",
    )
    sizes: Counts = Field(
        default_factory=list,
        description="Sizes of the clients' shards that the server knows of, in the order of the clients; none of them "
        "counts for more. []: those of a simulation; on real devices the median of what a round's clients claim.",
    )

    def conflicts(self, config: Any) -> Iterator[str]:
        cohort, clients = config.population.cohort, config.population.clients
        if self.minimum > cohort:
            yield misfit("aggregate.minimum", self.minimum, f"at most population.cohort = {cohort}")
        if self.sizes and len(self.sizes) != clients:
            yield misfit("aggregate.sizes", self.sizes, f"one size for each of population.clients = {clients}, or []")
        if config.horizon_rounds > config.attacked_rounds > 0:
            text = f"at most {config.attacked_rounds}, as many rounds as train under the whole attack"
            yield misfit("aggregate.horizon", self.horizon, text)

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.horizon == 1:
            yield "horizon", "a single round, which is its own mean"
        elif not config.horizon_rounds:
            yield "horizon", f"rounds = {config.rounds}, of which it is fewer than two"


class CheckpointSettings(Section):
    """How often a run is saved."""

    every: int = Field(default=1, ge=1, description="Rounds from one checkpoint to the next.")
    keep: int = Field(
        default=2,
        ge=1,
        description="Checkpoints that are kept; with 2, a damaged one has a predecessor. The newest that training "
        "has gone on from is kept as well, and that of the best round so far.",
    )
