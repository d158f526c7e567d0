"""Runner of worlds: every contestant under every intent for every seed, each simulation done once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

from daemon.process_tree import set_parent_death_signal
from fingerprint.errors import ConfigError
from iserve.evaluation.arena import Arena, make_arena
from iserve.evaluation.contestants import CONTESTANTS, ORACLE, STRONG_RULE, check_names, make_contestant
from iserve.evaluation.document import (
    ContestantResult,
    EvaluationDocument,
    Promise,
    SeedResult,
    ServedVariants,
    WorldResult,
    compared,
)
from iserve.evaluation.metrics import Metrics, metrics_of, missed_of, score
from iserve.evaluation.oracle import search
from iserve.evaluation.play import Played, play
from iserve.evaluation.situation import Contestant, Replica
from iserve.evaluation.world import World
from planner.intent import IntentKind

__all__ = ["WorldRun", "evaluate"]

Report = Callable[[str], None]


def _silent(text: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class WorldRun:
    """World that is to be run, where it was read from, and what was changed in it."""

    world: World
    folder: Path
    changed: tuple[str, ...] = ()


def evaluate(
    runs: Sequence[WorldRun],
    *,
    contestants: tuple[str, ...] = (),
    seeds: int | None = None,
    report: Report = _silent,
    jobs: int = 1,
) -> EvaluationDocument:
    """Return every contestant's metrics in every world, the same for any number of processes.

    Args:
        contestants: in place of those that the worlds name; none: the worlds' own.
        seeds: the first so many of each world; None: all.
        report: is given a line before each piece of work; with several processes after each.
        jobs: processes that share the work, by world, seed and contestant; they end when this one does.

    Raises:
        ConfigError: an unknown contestant, a world that cannot be used, or no process.
    """
    if jobs < 1:
        raise ConfigError(f"the work needs at least one process, got {jobs} jobs")
    began_s = time.monotonic()
    for run in runs:
        check_names(contestants or run.world.contestants)
    pieces = [piece for run in runs for piece in _pieces(run, contestants, seeds, is_split=jobs > 1)]
    found = [piece.results(report) for piece in pieces] if jobs == 1 else _found_by(jobs, pieces, report)
    done = list(zip(pieces, found, strict=True))
    worlds = tuple(_result_of(run, [(of, each) for of, each in done if of.run is run]) for run in runs)
    return EvaluationDocument(worlds=worlds, seconds=time.monotonic() - began_s)


_Found: TypeAlias = dict[tuple[str, IntentKind], SeedResult]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Contestants in one world for one seed; each finds the same with and without the rest, but for the oracle."""

    run: WorldRun
    seed: int
    names: tuple[str, ...]

    def results(self, report: Report = _silent) -> tuple[int, _Found]:
        """Return the number of requests, and what became of each contestant under each intent."""
        world = self.run.world
        arena = make_arena(world, self.seed, self.run.folder)
        course = _Course(arena, report)
        found = {
            (name, intent): course.result(name, intent, self.names)
            for intent in world.intents
            for name in self.names
        }
        return len(arena.requests), found


def _pieces(run: WorldRun, contestants: tuple[str, ...], seeds: int | None, *, is_split: bool) -> list[_Piece]:
    """Return the work of a world by seed; ``is_split``: by contestant too, as far as they need not each other."""
    world = run.world
    has_variants = any(model.variant_names for model in world.models)
    names = check_names(contestants or world.contestants, variants=has_variants)
    parts = [(name,) for name in names] if is_split and ORACLE not in names else [names]
    return [_Piece(run, seed, part) for seed in world.seeds[:seeds] for part in parts]


def _found_by(jobs: int, pieces: Sequence[_Piece], report: Report) -> list[tuple[int, _Found]]:
    """Return the results of ``pieces``, in their order, by so many processes."""
    found = []
    fork = get_context("fork")  # a worker's parent is this process, and no server of forks
    with ProcessPoolExecutor(jobs, fork, initializer=_end_with, initargs=(os.getpid(),)) as processes:
        for piece, results in zip(pieces, processes.map(_Piece.results, pieces), strict=True):
            report(f"{piece.run.world.name}, seed {piece.seed}: {', '.join(piece.names)}")
            found.append(results)
    return found


def _end_with(parent_pid: int) -> None:
    """Have a worker end when its parent does, however that ends."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above took effect
        os._exit(1)


def _result_of(run: WorldRun, done: Sequence[tuple[_Piece, tuple[int, _Found]]]) -> WorldResult:
    world = run.world
    requests = {piece.seed: number for piece, (number, _) in done}
    by_seed: dict[tuple[str, IntentKind], list[SeedResult]] = {}
    for intent in world.intents:
        for piece, (_, found) in done:
            for name in piece.names:
                by_seed.setdefault((name, intent), []).append(found[name, intent])
    results = [
        ContestantResult(
            contestant=name, intent=intent, has_trace=CONTESTANTS[name].has_trace, seeds=tuple(of_seeds)
        )
        for (name, intent), of_seeds in by_seed.items()
    ]
    return WorldResult(
        name=world.name,
        about=world.about,
        cluster=world.cluster,
        information=world.information,
        interconnect=world.interconnect,
        quality=world.quality,
        truth=world.truth,
        changed=run.changed,
        requests=tuple(requests.values()),
        results=compared(results, strong_rule=STRONG_RULE, oracle=ORACLE),
    )


class _Course:
    """All contestants in one arena."""

    def __init__(self, arena: Arena, report: Report) -> None:
        self._arena, self._report = arena, report
        self._made: dict[str, Contestant] = {}
        self._played: dict[tuple[str, IntentKind | None], tuple[Metrics, Played]] = {}

    def result(self, name: str, intent: IntentKind, names: tuple[str, ...]) -> SeedResult:
        if name == ORACLE:
            return self._searched(intent, names)
        metrics, played = self._course_of(name, intent)
        found = self._seed_result(metrics, played.replicas, intent, reasons=played.reasons)
        slots = tuple(
            ServedVariants(deployment=one.name, figures=one.variants)
            for one in played.result.deployments
            if one.variants is not None
        )
        return replace(found, promises=self._promises(played), variants=slots)

    def _promises(self, played: Played) -> tuple[Promise, ...]:
        said = {one.deployment: one.miss_probability for one in played.replicas}
        missed = missed_of(self._arena, played.result)
        return tuple(
            Promise(deployment=name, forecast=forecast, simulated=missed[name])
            for name, forecast in said.items()
            if forecast is not None and name in missed
        )

    def _course_of(self, name: str, intent: IntentKind) -> tuple[Metrics, Played]:
        key = (name, intent if CONTESTANTS[name].by_intent else None)
        if key not in self._played:
            self._tell(name, intent)
            arena = self._arena_of(name)
            played = play(arena, self._contestant(name), intent, routing=CONTESTANTS[name].routing)
            self._played[key] = (metrics_of(arena, played.result), played)
        return self._played[key]

    def _arena_of(self, name: str) -> Arena:
        return self._arena.merged if CONTESTANTS[name].is_merged else self._arena

    def _contestant(self, name: str) -> Contestant:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = make_contestant(name, self._arena_of(name))
        return made

    def _searched(self, intent: IntentKind, names: tuple[str, ...]) -> SeedResult:
        known = [name for name in names if name != ORACLE and self._arena_of(name) is self._arena]
        starts = [self._course_of(name, intent)[1].replicas for name in known]
        if not starts:
            starts = [self._course_of(STRONG_RULE, intent)[1].replicas]
        self._tell(ORACLE, intent)
        found = search(self._arena, intent, starts, self._arena.world.oracle)
        notes = (f"{found.simulations} simulations",)
        return self._seed_result(
            found.metrics, found.replicas, intent, reasons=notes, simulations=found.simulations
        )

    def _tell(self, name: str, intent: IntentKind) -> None:
        self._report(f"{self._arena.world.name}, seed {self._arena.seed}, {intent}: {name}")

    def _seed_result(
        self,
        metrics: Metrics,
        replicas: tuple[Replica, ...],
        intent: IntentKind,
        *,
        reasons: tuple[str, ...],
        simulations: int | None = None,
    ) -> SeedResult:
        return SeedResult(
            seed=self._arena.seed,
            metrics=metrics,
            score=score(metrics, intent),
            plan=tuple(_words(replica) for replica in replicas),
            reasons=reasons,
            simulations=simulations,
        )


def _words(replica: Replica) -> str:
    config, limits = replica.config, replica.limits
    pp = f",pp={config.pp}" if config.pp > 1 else ""
    weights = "" if config.weights == "16bit" else f",weights={config.weights}"
    devices = "+".join(device.rpartition(":")[2] for device in replica.placement.device_ids)
    return f"{replica.deployment}: tp={config.tp}{pp}{weights} on {devices}, {limits.max_batch} at once" + (
        "" if limits.kv_tokens is None else f", {limits.kv_tokens:,} KV tokens"
    )
