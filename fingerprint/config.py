"""The vocabulary of a deployment: formats, degrees, and the workload they are judged on.

These names are the ones used in code, in JSON and on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from math import ceil
from typing import TypeVar

from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError

__all__ = [
    "ADAPTER_RANKS",
    "LOADED_PER_SLOT",
    "MAX_ADAPTER_SLOTS",
    "MAX_DELTA_MIB",
    "MAX_GPUS",
    "DeploymentConfig",
    "KvFormat",
    "Pruning",
    "SlotFormat",
    "WeightFormat",
    "Workload",
    "even_split",
    "parse_config",
]


MAX_GPUS = 1024  # of one plan or deployment; placement answers in milliseconds up to here
MAX_DRAFT_TOKENS = 16
MAX_ADAPTER_SLOTS = 256
MAX_DELTA_MIB = 2**20
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256)  # that a slot can be made for: of the ranks that vLLM offers
LOADED_PER_SLOT = 4  # adapters that a worker keeps loaded, on the host where they do not run, for each slot
_LEAST_SHARE = 1 / 8  # of a place that an adapter takes there, however small its rank
_SHARE_STEPS = 64  # in which shares are counted: their sums are exact


class WeightFormat(StrEnum):
    """Format in which linear weights are stored.

    ``int8`` is W8A16; ``int4`` and ``gptq4`` are W4A16 with group 128; ``stored`` is whatever an already quantized
    checkpoint has (``ModelSpec.stored``).
    """

    BITS16 = "16bit"
    INT8 = "int8"
    INT4 = "int4"
    GPTQ4 = "gptq4"
    FP8 = "fp8"
    STORED = "stored"


class KvFormat(StrEnum):
    """Format in which the KV cache is stored."""

    BITS16 = "16bit"
    INT8 = "int8"
    FP8 = "fp8"


class Pruning(StrEnum):
    """Choice of weights to remove. ``sparsegpt`` and ``wanda`` are unstructured 50%."""

    NONE = "none"
    SPARSEGPT = "sparsegpt"
    WANDA = "wanda"
    WANDA_2_4 = "wanda-2:4"
    WANDA_4_8 = "wanda-4:8"
    LLM_PRUNER_25 = "llm-pruner-25"


class SlotFormat(StrEnum):
    """Format of the deltas in slots (``fingerprint.delta.FORMATS``), on engines whose slots have one."""

    NONE = "none"
    INT1 = "int1"
    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    SPARSE24_INT2 = "sparse24-int2"
    SPARSE24_INT4 = "sparse24-int4"


class _Experts(StrEnum):
    """Ways in which the GPUs of a TP group divide a mixture's experts, as texts name them."""

    TENSOR = "tensor"
    PARALLEL = "parallel"


_KEYS = ("tp", "pp", "weights", "kv", "pruning", "experts")
_Named = TypeVar("_Named", bound=StrEnum)


@dataclass(frozen=True, order=True, slots=True)
class DeploymentConfig:
    """Point of the configuration space, on one engine."""

    tp: int = 1
    """Tensor-parallel degree: GPUs among which each layer is split."""
    pp: int = 1
    """Pipeline-parallel degree: stages among which the layers are divided."""
    weights: WeightFormat = WeightFormat.BITS16
    """Storage format of the linear weights."""
    kv: KvFormat = KvFormat.BITS16
    """Storage format of the KV cache."""
    pruning: Pruning = Pruning.NONE
    """Pruning method; `none` keeps every weight."""
    engine: str = "torch"
    """Inference engine by its name; `torch` is the embedded one."""
    draft_tokens: int = 0
    """Tokens that each step verifies of a sequence beyond its next, drafted from n-grams of its text; 0: none."""
    adapter_slots: int = 0
    """LoRA adapters that may take part in one step, next to the base; 0: the base alone is served."""
    adapter_rank: int = 0
    """Largest rank of an adapter that a slot holds; 0 without slots, or in slots for deltas alone."""
    delta_mib: int = 0
    """MiB of the largest delta of a full fine-tune that a slot holds on each GPU; 0: slots hold adapters alone."""
    delta_format: SlotFormat = SlotFormat.NONE
    """Format of the deltas that slots hold on an engine whose slots have one (vLLM); `none`: they hold none."""
    expert_parallel: bool = False
    """Whether the GPUs of `tp` divide a mixture's experts as wholes, each expert on one GPU; else each matrix."""

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ConfigError(f"tp and pp must be at least 1, got tp={self.tp}, pp={self.pp}")
        if self.tp * self.pp > MAX_GPUS:
            raise ConfigError(f"tp * pp may be {MAX_GPUS} at most, got tp={self.tp}, pp={self.pp}")
        if self.expert_parallel and self.tp == 1:
            raise ConfigError(
                "experts=parallel divides the experts among the GPUs of tp, and tp=1 has one; give tp=2 or more, "
                "or leave it out"
            )
        if not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"drafts must be from 0 to {MAX_DRAFT_TOKENS} tokens, got {self.draft_tokens}")
        if not 0 <= self.adapter_slots <= MAX_ADAPTER_SLOTS:
            raise ConfigError(f"adapter slots must be from 0 to {MAX_ADAPTER_SLOTS}, got {self.adapter_slots}")
        if self.has_delta_slots and not self.adapter_slots:
            raise ConfigError(f"deltas in {self.delta_format} need adapter slots, and there are none")
        if self.has_delta_slots and self.delta_mib:
            raise ConfigError("slots for deltas have a format or a size, which is the engine's matter; give one")
        of_slots = (*((0,) if self.has_delta_slots else ()), *ADAPTER_RANKS)
        if self.adapter_rank not in (of_slots if self.adapter_slots else (0,)):
            ranks = ", ".join(map(str, ADAPTER_RANKS))
            raise ConfigError(f"adapter slots hold a largest rank of {ranks}, got {self.adapter_rank}")
        if not 0 <= self.delta_mib <= (MAX_DELTA_MIB if self.adapter_slots else 0):
            raise ConfigError(f"adapter slots hold deltas of up to {MAX_DELTA_MIB} MiB, got {self.delta_mib}")

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp

    @property
    def without_expert_parallel(self) -> DeploymentConfig:
        """The same configuration with the matrices of each expert divided, as every other matrix is."""
        return replace(self, expert_parallel=False) if self.expert_parallel else self

    @property
    def has_delta_slots(self) -> bool:
        """True where slots have a format for deltas."""
        return self.delta_format is not SlotFormat.NONE

    @property
    def without_slots(self) -> DeploymentConfig:
        """The same configuration of the base alone."""
        if not self.adapter_slots:
            return self
        return replace(self, adapter_slots=0, adapter_rank=0, delta_mib=0, delta_format=SlotFormat.NONE)

    @property
    def loaded_adapters(self) -> int:
        """Places of loaded adapters, each for one of ``adapter_rank``; ``adapter_slots`` take part in one step.

        As many where slots have a format for deltas: one without a slot would be copied into one within a step.
        """
        return self.adapter_slots * (1 if self.has_delta_slots else LOADED_PER_SLOT)

    def place_share(self, rank: int) -> float:
        """Return the share that an adapter of ``rank`` takes of a place, where an engine lets several share one.

        All of it, of the slots' rank; half of it, of half of that rank, and so on down to an eighth.
        """
        if self.has_delta_slots or not self.adapter_rank:
            return 1.0
        return min(1.0, max(_LEAST_SHARE, ceil(_SHARE_STEPS * rank / self.adapter_rank) / _SHARE_STEPS))

    def __str__(self) -> str:
        experts = ",experts=parallel" if self.expert_parallel else ""
        drafts = f",drafts={self.draft_tokens}" if self.draft_tokens else ""
        adapters = f",adapters={self.adapter_slots}xr{self.adapter_rank}" if self.adapter_slots else ""
        adapters += f",delta={self.delta_mib}MiB" if self.delta_mib else ""
        adapters += f",deltas={self.delta_format}" if self.has_delta_slots else ""
        formats = f"weights={self.weights},kv={self.kv},pruning={self.pruning}"
        return f"tp={self.tp},pp={self.pp},{formats}{experts}{drafts}{adapters}"


def parse_config(text: str, *, engine: str) -> DeploymentConfig:
    """Read ``tp=2,pp=1,weights=16bit,kv=16bit,pruning=none,experts=parallel``; keys left out take their defaults.

    Raises:
        ConfigError: an unknown or repeated key, or a value that is not one of the known names.
    """
    values: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator or key not in _KEYS:
            raise ConfigError(f"{part!r} is not one of {', '.join(f'{name}=' for name in _KEYS)}")
        if key in values:
            raise ConfigError(f"{key} is given twice in {text!r}")
        values[key] = value
    return DeploymentConfig(
        tp=_degree("tp", values),
        pp=_degree("pp", values),
        weights=_format(WeightFormat, "weights", values, WeightFormat.BITS16),
        kv=_format(KvFormat, "kv", values, KvFormat.BITS16),
        pruning=_format(Pruning, "pruning", values, Pruning.NONE),
        engine=engine,
        expert_parallel=_format(_Experts, "experts", values, _Experts.TENSOR) is _Experts.PARALLEL,
    )


def _degree(key: str, values: Mapping[str, str]) -> int:
    try:
        return int(values.get(key, "1"))
    except ValueError as error:
        raise ConfigError(f"{key} must be a whole number, got {values[key][:80]!r}") from error


def _format(kind: type[_Named], key: str, values: Mapping[str, str], default: _Named) -> _Named:
    given = values.get(key, default)
    try:
        return kind(given)
    except ValueError as error:
        near = get_close_matches(given, list(kind), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}={given[:80]!r} is not one of {', '.join(kind)}{hint}") from error


_MOST_TOKENS = 100_000_000


@dataclass(frozen=True, order=True, slots=True)
class Workload:
    """The requests a configuration is judged on: ``batch`` at once, all of one shape; longer ones are taken."""

    batch: int = 1
    """Requests at once."""
    input_tokens: int = 512
    """Prompt length in tokens."""
    output_tokens: int = 128
    """Answer length in tokens."""
    longest_tokens: int = 0
    """Longest request, prompt and answer together; 0: none is longer than the two lengths above."""
    images: int = 0
    """Number of images in each prompt, whose tokens are part of `input_tokens`."""
    tokens_per_image: int = 0
    """Prompt tokens of each image."""

    def __post_init__(self) -> None:
        for name in ("batch", "input_tokens", "output_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= _MOST_TOKENS:
                raise ConfigError(f"{name} must be between 1 and {_MOST_TOKENS:,}, got {value}")
        usual = self.input_tokens + self.output_tokens
        if self.longest_tokens > _MOST_TOKENS:
            raise ConfigError(f"the context must be at most {_MOST_TOKENS:,} tokens, got {self.longest_tokens}")
        if self.longest_tokens and self.longest_tokens < usual:
            raise ConfigError(
                f"a context of {self.longest_tokens} tokens is shorter than the planned request of {usual} "
                f"({self.input_words} input + {self.output_tokens} output): give at least {usual}, or fewer "
                "input or output tokens"
            )

    def with_images(self, images: int, tokens_per_image: int) -> Workload:
        """Return the same requests with so many images in each prompt, whose tokens are added.

        Raises:
            ConfigError: the prompt becomes too long, or longer than the given context.
        """
        added = images * tokens_per_image
        return replace(
            self, input_tokens=self.input_tokens + added, images=images, tokens_per_image=tokens_per_image
        )

    @property
    def input_words(self) -> str:
        """The prompt's length, that of its images apart: ``512 + 2 x 576 image``."""
        if not self.images:
            return str(self.input_tokens)
        text = self.input_tokens - self.images * self.tokens_per_image
        return f"{text} + {self.images} x {self.tokens_per_image} image"

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sequence at its end."""
        return max(self.input_tokens + self.output_tokens, self.longest_tokens)

    @property
    def most_prompt_tokens(self) -> int:
        """Prompt tokens that may be handed over at once: of the batch, or of the longest request."""
        return max(self.batch * self.input_tokens, self.longest_tokens)

    def kv_tokens(self, engine: str) -> int:
        """Return the tokens that the KV cache has room for.

        Where every sequence has a slot of its own, that is ``batch`` of the longest; where they share pages,
        ``batch`` of the usual length and at least one of the longest: many long ones at once wait.
        """
        if traits_of(engine).has_slots:
            return self.batch * self.context_tokens
        return max(self.batch * (self.input_tokens + self.output_tokens), self.context_tokens)


def even_split(num_layers: int, pp: int) -> tuple[int, ...]:
    """Return layers per stage, as even as possible, the longer stages first.

    Raises:
        ConfigError: more stages than layers.
    """
    if pp > num_layers:
        raise ConfigError(f"pp={pp} needs at least {pp} layers, the model has {num_layers}")
    base, extra = divmod(num_layers, pp)
    return tuple(base + (stage < extra) for stage in range(pp))
