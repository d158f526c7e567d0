"""Schema of a world file: a cluster, models, requests, what contestants know, and the truth of the simulator.

Values are checked on construction; ``world_file`` reads them from YAML or JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fingerprint.delta.formats import FORMATS
from fingerprint.errors import ConfigError
from fingerprint.gpus import parse_gpus
from planner.adapter_slots import MOST_SLOTS
from planner.intent import MOST_SKEW, IntentKind, Quality, Traffic

__all__ = [
    "INTENTS",
    "Information",
    "Interconnect",
    "LengthLaw",
    "OracleBudget",
    "RateChange",
    "RequestLaw",
    "Truth",
    "World",
    "WorldModel",
    "WorldVariants",
]

INTENTS = (IntentKind.MIN_COST, IntentKind.MIN_LATENCY, IntentKind.LATENCY_SLO, IntentKind.MIN_GPU_HOURS)
_MOST_SECONDS = 7 * 86_400  # of a horizon: a week in slots of one second


class Information(StrEnum):
    """Knowledge about the load that a world gives to its contestants."""

    NONE = "none"  # models and mean lengths
    RATES = "rates"  # and the mean rate of each deployment
    TRACE = "trace"  # and every request


class Interconnect(StrEnum):
    """Knowledge of ours about the links between GPUs."""

    MEASURED = "measured"  # as a daemon measures them in the simulated truth
    UNMEASURED = "unmeasured"  # the datasheet's


def _check(path: str, value: float, least: float = 0.0, *, above: bool = False) -> None:
    bound = f"above {least:g}" if above else f"at least {least:g}"
    if not math.isfinite(value) or value < least or (above and value == least):
        raise ConfigError(f"{path} must be a finite number {bound}, got {value:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldVariants:
    """Variants of a model, all alike: LoRA adapters, or deltas of full fine-tunes."""

    number: int
    """Number of variants, which requests call as `NAME/1`, `NAME/2`, ... of the model's name; 0: none."""
    rank: int | None = None
    """Rank of adapters; or give `delta_format` or `delta_mib`."""
    delta_format: str | None = None
    """Format of deltas by which their size is counted, such as `int2`; or give `rank` or `delta_mib`."""
    delta_mib: int | None = None
    """MiB of each delta; or give `rank` or `delta_format`."""
    popularity: str = "zipf:1"
    """Shares of the variants: `even`, or `zipf:S` (the i-th's is proportional to 1 / i^S; S is 0 to 10)."""
    base_share: float = 0.0
    """Share of the model's requests that is for the base itself."""
    slots: int = 0
    """Variants at once at a replica; 0: as many as iServe reserves on one GPU."""

    def __post_init__(self) -> None:
        kinds = {"rank": self.rank, "delta_format": self.delta_format, "delta_mib": self.delta_mib}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"variants are adapters (rank) or deltas (delta_format or delta_mib): give one of these, got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.delta_format is not None and self.delta_format not in FORMATS:
            raise ConfigError(f"delta_format is one of {', '.join(FORMATS)}, got {self.delta_format!r}")
        if self.delta_mib is not None:
            _check("delta_mib of variants", self.delta_mib, 1)
        if not 0 <= self.slots <= MOST_SLOTS:
            raise ConfigError(f"slots of variants are 0 (as iServe reserves) to {MOST_SLOTS}, got {self.slots}")
        self.traffic(self.delta_mib or 0)

    def traffic(self, delta_mib: int) -> Traffic:
        """Return the variants as plans know them, deltas being of ``delta_mib``; none where ``number`` is 0."""
        plain = Traffic()
        return Traffic(
            variants=self.number,
            variant_rank=plain.variant_rank if self.rank is None else self.rank,
            delta_mib=delta_mib if self.number else 0,
            variant_skew=_exponent("popularity", self.popularity),
            base_share=self.base_share,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModel:
    """Deployment of a model: its name, the model's shape, and the time at which it is asked for."""

    name: str
    """Name that requests call."""
    model: str | None = None
    """Folder with a `config.json`, relative to the world file, or a Hugging Face id; or give `config`."""
    config: dict[str, Any] | None = None
    """Content of a `config.json`; or give `model`."""
    deploy_at_s: float = 0.0
    """Seconds from the start at which the deployment is asked for."""
    variants: WorldVariants | None = None
    """LoRA adapters or deltas of the model that requests ask for."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a model needs a name that requests call")
        if (self.model is None) == (self.config is None):
            raise ConfigError(f"model {self.name!r}: give either model (a folder or an id) or config, not both")
        _check(f"deploy_at_s of {self.name!r}", self.deploy_at_s)

    @property
    def variant_names(self) -> tuple[str, ...]:
        """Names that requests for its variants call, the most popular first."""
        number = 0 if self.variants is None else self.variants.number
        return tuple(f"{self.name}/{index}" for index in range(1, number + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLaw:
    """Lognormal lengths of prompts and answers, each by its mean and coefficient of variation."""

    input_mean_tokens: float
    """Mean prompt length."""
    output_mean_tokens: float
    """Mean answer length."""
    input_cv: float = 1.0
    """Standard deviation of prompt lengths over their mean."""
    output_cv: float = 1.0
    """Standard deviation of answer lengths over their mean."""

    def __post_init__(self) -> None:
        _check("input_mean_tokens", self.input_mean_tokens, 1)
        _check("output_mean_tokens", self.output_mean_tokens, 1)
        _check("input_cv", self.input_cv)
        _check("output_cv", self.output_cv)


@dataclass(frozen=True, kw_only=True, slots=True)
class RateChange:
    """Change of one model's rate, from a time on."""

    at_s: int
    """Seconds after requests begin, whole."""
    model: str
    """Name of the model whose rate changes."""
    factor: float
    """Multiple of its rate before all changes; 0: no more requests."""

    def __post_init__(self) -> None:
        _check("at_s of a change", self.at_s)
        _check(f"the factor of the change of {self.model!r}", self.factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLaw:
    """Source of the requests: a trace, or a law; their rate, and their shares by model."""

    trace: str | None = None
    """Trace file, relative to the world file, or `synthetic:NAME`; or give `lengths`."""
    start_s: float = 0.0
    """Seconds of the trace that are left out."""
    lengths: LengthLaw | None = None
    """Lengths of requests by a law; or give `trace`."""
    lengths_by_model: dict[str, LengthLaw] = field(default_factory=dict)
    """Lengths of single models, in place of `lengths`."""
    arrival_cv: float = 1.0
    """Coefficient of variation of a law's gaps between arrivals (Gamma); 1: Poisson."""
    rate_per_s: float | None = None
    """Requests per second of all models; a trace is stretched in time to have it, left out it keeps its own."""
    rates_per_s: dict[str, float] = field(default_factory=dict)
    """Requests per second of each model, of a law, in place of `rate_per_s` and `shares`."""
    shares: str | dict[str, float] = "even"
    """Shares of the models: `even`, `zipf:S` (the i-th model's is proportional to 1 / i^S; S is 0 to 10), or a
    weight each."""
    changes: tuple[RateChange, ...] = ()
    """Changes over time; of a trace they change the shares and not the rate of all."""
    daily_amplitude: float = 0.0
    """Daily swing of a law's rates, as a share of them, from 0 to 1; lowest at the start."""
    daily_period_s: float = 86_400.0
    """Length of the day."""
    max_input_tokens: int = 8192
    """Longest prompt; longer ones are cut."""
    max_output_tokens: int = 2048
    """Longest answer; longer ones are cut."""

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.lengths is None):
            raise ConfigError("requests: give either trace or lengths (a law), not both")
        _check("start_s", self.start_s)
        _check("arrival_cv", self.arrival_cv, above=True)
        _check("daily_period_s", self.daily_period_s, above=True)
        if not 0 <= self.daily_amplitude <= 1:
            raise ConfigError(f"daily_amplitude must be from 0 to 1, got {self.daily_amplitude:g}")
        for name, value in (("input", self.max_input_tokens), ("output", self.max_output_tokens)):
            _check(f"max_{name}_tokens", value, 1)
        if self.rate_per_s is not None:
            _check("rate_per_s", self.rate_per_s, above=True)
        for model, rate in self.rates_per_s.items():
            _check(f"rates_per_s of {model!r}", rate)
        if self.trace is None and (self.rate_per_s is None) == (not self.rates_per_s):
            raise ConfigError("requests of a law: give either rate_per_s (of all) or rates_per_s (of each model)")
        if self.trace is not None and (self.rates_per_s or self.lengths_by_model or self.daily_amplitude):
            raise ConfigError(
                "requests of a trace have its lengths and its course: leave out rates_per_s, lengths_by_model and "
                "daily_amplitude, or give a law in place of the trace"
            )
        if self.rates_per_s and self.shares != "even":
            raise ConfigError("requests: rates_per_s states each model's rate; leave out shares")

    def weights(self, names: tuple[str, ...]) -> dict[str, float]:
        """Return each model's share before all changes; they add up to 1.

        Raises:
            ConfigError: an unknown law, or a weight missing, below 0 or of an unknown model.
        """
        if isinstance(self.shares, str):
            exponent = _exponent("shares", self.shares, ", or a weight by model")
            given = {name: 1 / rank**exponent for rank, name in enumerate(names, start=1)}
        else:
            given = self.shares
            if set(given) != set(names):
                raise ConfigError(f"shares names {', '.join(given)}; the models are {', '.join(names)}")
            for name, weight in given.items():
                _check(f"the share of {name!r}", weight)
        total = sum(given.values())
        _check("the sum of the shares", total, above=True)
        return {name: given[name] / total for name in names}


def _exponent(what: str, text: str, more: str = "") -> float:
    """Return S of ``zipf:S``; 0: even."""
    name, _, exponent = text.partition(":")
    if text == "even":
        return 0.0
    try:
        if name != "zipf":
            raise ValueError(text)
        value = float(exponent or "1")
    except ValueError:
        raise ConfigError(f"{what} is even, zipf:S with a number S{more}, got {text!r}") from None
    if not 0 <= value <= MOST_SKEW:
        raise ConfigError(f"{what}: the exponent of zipf is from 0 to {MOST_SKEW:g}, got {value:g}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """Parameters that only the simulator has; a contestant believes in 1 for each factor but ``sharing``."""

    all_reduce: float = 1.0
    """Factor on the time of communication between GPUs."""
    sharing: float = 1.1
    """Time that each further busy engine on a GPU costs, as a multiple of its own step. Crowded TP groups lose
    more (``fingerprint.gpu_sharing``), whatever this is."""
    step_times: float = 1.0
    """Factor on the time of every step."""
    load_times: float = 1.0
    """Factor on the time of a load of a variant; 0: none takes time."""
    startup_s: float = 60.0
    """Seconds from the decision to deploy until a worker serves."""

    def __post_init__(self) -> None:
        for name in ("all_reduce", "sharing", "step_times"):
            _check(f"truth.{name}", getattr(self, name), above=True)
        _check("truth.load_times", self.load_times)
        _check("truth.startup_s", self.startup_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleBudget:
    """Bounds of the oracle's search, whichever is reached first."""

    simulations: int = 2_000
    """Most simulations of one search."""
    seconds: float = 300.0
    """Most seconds of one search; a search that ends by them is not repeatable."""

    def __post_init__(self) -> None:
        _check("oracle.simulations", self.simulations, 1)
        _check("oracle.seconds", self.seconds, above=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """World: everything that decides what a contestant is asked and how its answer fares.

    Raises:
        ConfigError: a value out of its range, or a name of a model that is not there.
    """

    name: str
    """Name of the world."""
    about: str = ""
    """Reason for the world, one sentence."""
    cluster: str
    """GPUs of one kind, such as `h200:4`."""
    gpus_per_node: int = 8
    """GPUs of one node."""
    models: tuple[WorldModel, ...]
    """Deployments, in the order of popularity where shares are ranked."""
    requests: RequestLaw
    """Requests."""
    horizon_s: float
    """Seconds in which requests arrive, after the first start-up."""
    intents: tuple[IntentKind, ...] = INTENTS
    """Intents that contestants are given, each by itself."""
    information: Information = Information.NONE
    """Knowledge about the load: `none`, `rates` or `trace`. AlpaServe and the oracle always have the trace."""
    interconnect: Interconnect = Interconnect.MEASURED
    """Links between GPUs as `ours`, `ours-by-number` and `ours-hybrid` know them: `measured` or `unmeasured`."""
    quality: Quality = Quality.EXACT
    """Formats that every contestant may choose."""
    engine: str = "vllm"
    """Engine of every contestant."""
    planned_batch: int = 32
    """Requests at once that rules and AlpaServe plan for."""
    contestants: tuple[str, ...] = ()
    """Contestants by name; none: all but AIConfigurator, AlpaServe and the oracle."""
    aiconfigurator_answers: str | None = None
    """File of recorded answers of AIConfigurator; none: `aiconfigurator.json.gz` in the world file's folder."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the requests."""
    slo_multiple: float = 5.0
    """SLO of each request: this multiple of its E2E alone on the least TP that fits."""
    guard_multiple: float = 3.0
    """Guard of min-cost: the P95 of E2E over that of one request alone, of each deployment."""
    truth: Truth = field(default_factory=Truth)
    """Parameters that only the simulator has."""
    oracle: OracleBudget = field(default_factory=OracleBudget)
    """Bounds of the oracle's search."""

    def __post_init__(self) -> None:
        parse_gpus(self.cluster)
        _check("horizon_s", self.horizon_s, above=True)
        if self.horizon_s > _MOST_SECONDS:
            raise ConfigError(f"horizon_s must be at most {_MOST_SECONDS:,}, got {self.horizon_s:g}")
        _check("gpus_per_node", self.gpus_per_node, 1)
        _check("planned_batch", self.planned_batch, 1)
        _check("slo_multiple", self.slo_multiple, 1)
        _check("guard_multiple", self.guard_multiple, 1)
        names = self.names
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"models: a world has at least one, each with a name of its own, got {list(names)}")
        taken = [name for model in self.models for name in model.variant_names if name in names]
        if taken:
            raise ConfigError(f"models: {taken[0]!r} is a variant's name too; name the model otherwise")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are different whole numbers of at least 0, got {list(self.seeds)}")
        other = [kind for kind in self.intents if kind not in INTENTS]
        if other or not self.intents:
            raise ConfigError(f"intents are some of {', '.join(INTENTS)}, got {list(map(str, self.intents))}")
        self._check_names("requests.changes", (change.model for change in self.requests.changes))
        self._check_names("requests.lengths_by_model", self.requests.lengths_by_model)
        rates = self.requests.rates_per_s
        if rates and set(rates) != set(names):
            raise ConfigError(f"requests.rates_per_s names {', '.join(rates)}; the models are {', '.join(names)}")
        self.requests.weights(names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the deployments."""
        return tuple(model.name for model in self.models)

    @property
    def model_of(self) -> dict[str, str]:
        """Model of every name that requests may call: its own, and those of its variants."""
        return {name: model.name for model in self.models for name in (model.name, *model.variant_names)}

    def _check_names(self, where: str, given: Iterable[str]) -> None:
        for name in given:
            if name not in self.names:
                raise ConfigError(f"{where} names {name!r}; the models are {', '.join(self.names)}")
