"""Replays of one server that fidelity_vllm keeps: what a file holds, its name, and which replay is next.

``NAME.prefix-off.json`` says how the server was launched and what its loads are shares of, and each replay has a
file of its own, ``NAME.prefix-off.load-0.7.2.json.xz``, so that what was played stays played.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from tests.bench.fidelity import Target
from tests.bench.fidelity_compare import Comparison, Sent
from tests.bench.fidelity_steps import Lone
from tests.bench.kept import read_kept, write_kept

__all__ = [
    "Asked",
    "Launch",
    "Played",
    "Turn",
    "keep",
    "launch_path",
    "order",
    "played_path",
    "read_launch",
    "read_played",
]

REPORTED_FROM = 0.9  # share of the capacity: a load of so much is reported and not judged


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Question that replays of one server have in common."""

    model: str
    profile: str  # what it was made of, where and when
    workload: Workload  # that the server is launched for: its slots and context
    trace: str  # file
    prefix_cache: bool
    shared_prefix: float  # of the prompts' tokens, asked; 0: none, or the trace's own
    window_s: float  # of arrivals
    capacity_by: str  # "burst", "simulator" or "given"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    date: str
    machine: str
    versions: str
    asked: Asked
    target: Target
    lone: Lone
    overhead_s: float
    capacity_requests_per_s: float  # that loads are shares of
    simulated_capacity_requests_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Turn of one load in one of its replays."""

    load: float
    repeat: int  # from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """Replay of a turn, and the simulator's prediction of it."""

    date: str
    turn: Turn
    seconds: float  # from the first request to the last answer
    failures: tuple[tuple[str, int], ...]
    found: Comparison
    requests: Sent
    cached_share: float | None  # of the prompts' tokens, by the server's counters; None: it has none
    simulated_cached_share: float
    tokens_in_one_piece: float  # share of the tokens that arrived in the piece of the one before


def order(loads: Sequence[float], repeats: int) -> list[Turn]:
    """Return the replays in the order in which they are played: what is dropped for want of time is at the end.

    Every load once; then the repeats of those that are judged, in turn; then those of the highest load.
    """
    lower = sorted(loads)[:-1]
    first = [Turn(load=load, repeat=1) for load in sorted(loads)]
    again = [Turn(load=load, repeat=repeat) for repeat in range(2, repeats + 1) for load in lower]
    return [*first, *again, *(Turn(load=max(loads), repeat=repeat) for repeat in range(2, repeats + 1))]


def _stem(out: Path, asked: Asked) -> Path:
    return out / f"{asked.model}.prefix-{'on' if asked.prefix_cache else 'off'}"


def launch_path(out: Path, asked: Asked) -> Path:
    return Path(f"{_stem(out, asked)}.json")


def played_path(out: Path, asked: Asked, turn: Turn) -> Path:
    return Path(f"{_stem(out, asked)}.load-{turn.load:g}.{turn.repeat}.json.xz")


def read_launch(out: Path, asked: Asked) -> Launch | None:
    """Return how the server of earlier replays was launched; None: there are none.

    Raises:
        ConfigError: they were of something else.
    """
    path = launch_path(out, asked)
    if not path.exists():
        return None
    launch = from_json(path.read_bytes(), Launch, what=str(path))
    if launch.asked != asked:
        raise ConfigError(
            f"{path} is of {launch.asked}, and asked is {asked}; ask for the same, or write to another folder"
        )
    return launch


def keep(out: Path, launch: Launch, played: Played | None = None) -> None:
    """Write a replay, or how its server was launched."""
    if played is None:
        write_kept(launch_path(out, launch.asked), to_json(launch, indent=1).decode())
    else:
        write_kept(played_path(out, launch.asked, played.turn), to_json(played).decode())


def read_played(out: Path) -> Iterator[tuple[Launch, tuple[Played, ...]]]:
    """Yield every server in ``out`` with its replays, by load and repeat."""
    for path in sorted(out.glob("*.prefix-o*.json")):
        launch = from_json(path.read_bytes(), Launch, what=str(path))
        files = sorted(out.glob(f"{path.stem}.load-*.json.xz"))
        played = [from_json(read_kept(file), Played, what=str(file)) for file in files]
        yield launch, tuple(sorted(played, key=lambda one: (one.turn.load, one.turn.repeat)))
