"""The simulation: one pass over arrivals, actions and ends of runs, in the order of their times.

Deterministic: at one time, actions come first, then arrivals, then ends of runs in the order in which they were
scheduled. So a step that ends as a request arrives is followed by one that may hold it, and a node that fails as
a request arrives does not serve it. No randomness of its own: chance is in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop

from fingerprint.errors import BadInputError, ConfigError, NotFoundError, PolicyError
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator.cluster import Cluster
from traces.simulator.deployments import Deployment, Deployments
from traces.simulator.kv_use import kv_use
from traces.simulator.policy_errors import PolicyFault
from traces.simulator.requests import Requests
from traces.simulator.result import DeploymentFigures, GpuFigures, SimulationResult
from traces.simulator.scenario import (
    Action,
    Deploy,
    NodeFails,
    NodeReturns,
    Policies,
    Profile,
    Remove,
    Scenario,
    Service,
)
from traces.simulator.workers import Job

__all__ = ["Progress", "simulate"]

Progress = Callable[[int, float], None]  # (requests that have arrived, simulated seconds)

_PATIENCE_S = 900.0  # after the last thing that happened, for a cluster policy to help those who still wait
_REPORT_EVERY = 1 << 14  # requests


def simulate(
    requests: Iterable[Request], scenario: Scenario, policies: Policies, *, progress: Progress | None = None
) -> SimulationResult:
    """Follow every request to its end.

    A request of a deployment without a replica is not served; one that is too long for it is a bad request. When
    more than ``scenario.most_waiting`` wait for one worker, the simulation stops and says so; what had not ended
    counts as interrupted.

    Raises:
        BadInputError: no request, or one that arrives before the one above it or asks for no token.
        NotFoundError: a request names what is never deployed.
        PolicyError: a policy raised, or answered what it must not.
    """
    if scenario.service is Service.STEPPED and policies.make_batcher is None:
        raise ConfigError("stepped service needs a batching policy to be handed in")
    if policies.cluster_policy is not None and not policies.cluster_policy.every_s > 0:
        raise ConfigError(f"a cluster policy looks at intervals above 0 s, got {policies.cluster_policy.every_s}")
    if scenario.token_times and policies.cluster_policy is not None:
        raise ConfigError("the times of single tokens are simulated of workers that no cluster policy moves")
    world = _World(scenario, policies)
    try:
        return _follow(requests, world, progress)
    except PolicyFault as fault:
        raise PolicyError(
            f"the policy {fault.policy} {fault.did}, at {world.now_s:.3f} s of simulated time"
        ) from fault


def _follow(requests: Iterable[Request], world: _World, progress: Progress | None) -> SimulationResult:
    last_s = 0.0
    for number, request in enumerate(requests, start=1):
        if not request.arrival_s >= last_s:
            raise BadInputError(
                f"request {number} arrives at {request.arrival_s} s, after one at {last_s} s; sort it by time"
            )
        last_s = request.arrival_s
        if world.next_s <= last_s or (world.events and world.events[0][0] < last_s):
            world.advance(last_s)
        world.arrive(request, number)
        if world.stopped:
            break
        if progress is not None and not number % _REPORT_EVERY:
            progress(number, last_s)
    if not len(world.requests):
        raise BadInputError("the trace has no request; there is nothing to simulate")
    return world.end()


class _World:
    """The state between two requests."""

    def __init__(self, scenario: Scenario, policies: Policies) -> None:
        self._scenario = scenario
        self.requests = Requests(token_times=scenario.token_times, prefix_cache=scenario.prefix_cache)
        self._cluster = Cluster(scenario.cluster, policies.contention_of(scenario.service))
        self._deployments = Deployments(scenario, policies, self._cluster, self.requests)
        self.events = self._cluster.events
        self._actions = sorted(scenario.actions, key=lambda action: action.at_s)[::-1]  # the next one is the last
        self._every_s = math.inf if policies.cluster_policy is None else policies.cluster_policy.every_s
        self._looks = 1  # of the cluster policy: the next one's number
        self.next_s = self._next()
        self.now_s = 0.0
        self.stopped: str | None = None
        self._variants_of = scenario.variant_deployment

    def advance(self, until_s: float) -> None:
        """Do all that happens before an arrival at ``until_s``."""
        events, cluster, deployments = self.events, self._cluster, self._deployments
        while True:
            event_s = events[0][0] if events else math.inf
            if self.next_s <= event_s:
                if self.next_s > until_s or self.next_s == math.inf:
                    return
                self._step(last=until_s == math.inf)
                self.next_s = self._next()
                continue
            if event_s >= until_s:
                return
            now_s, _, version, server = heappop(events)
            if version != server.version:
                continue
            self.now_s = now_s
            if server.busy:
                server.finish(now_s)
            cluster.go_on(server, now_s)
            deployment = deployments.of(server)
            if deployment is None:
                if not server.busy and isinstance(server, Job):
                    deployments.profiled(server, now_s)
            else:
                may_send = deployment.traffic is None or deployments.dispatch.note(deployment, server, now_s)
                if deployment.draining or deployment.coming:
                    deployments.turn(server, now_s)
                if may_send and (deployment.queue or deployment.traffic is not None):
                    deployments.dispatch.pass_on(deployment, now_s)

    def _next(self) -> float:
        """Return the time of the next action, or of the cluster policy's next look."""
        act_s = self._actions[-1].at_s if self._actions else math.inf
        return min(act_s, self._looks * self._every_s)

    def _step(self, *, last: bool) -> None:
        """Take the next action, or the policy's next look; after the last arrival it looks while that can help."""
        if self._actions and self._actions[-1].at_s <= self.next_s:
            self.now_s = self.next_s
            self._act(self._actions.pop())
            return
        self._looks += 1
        over = last and not self._actions
        if over and not self._deployments.work_left:
            self._every_s = math.inf
        elif self._deployments.steer(self.next_s):
            self.now_s = self.next_s
        elif over and not self.events and self.next_s > self.now_s + _PATIENCE_S:
            self._every_s = math.inf

    def arrive(self, request: Request, number: int) -> None:
        now_s, name = request.arrival_s, request.model
        self.now_s = now_s
        deployment, variant = self._deployments.by_name.get(name), None
        if deployment is None:
            of = self._scenario.variants.get(name, self._variants_of)
            if of is not None:
                deployment, variant = self._deployments.by_name[of], name
        if deployment is None:
            known = ", ".join(self._deployments.by_name) or "nothing"
            raise NotFoundError(
                f"request {number} at {now_s:g} s calls {name!r}, which is never deployed; deployed are {known}"
            )
        if request.input_tokens < 1 or request.output_tokens < 1:
            raise BadInputError(
                f"request {number} at {now_s:g} s has {request.input_tokens} input and {request.output_tokens} "
                "output tokens; at least one of each is simulated"
            )
        row = self.requests.add(
            now_s, request.input_tokens, request.output_tokens, deployment.index, request.prefix_blocks
        )
        deployment.arrived += 1
        self._deployments.dispatch.arrive(deployment, row, now_s, variant)
        if len(deployment.queue) > self._scenario.most_waiting:
            self.stopped = self._overload(deployment)

    def end(self) -> SimulationResult:
        """Return the result, after the last arrival."""
        figures = tuple(
            DeploymentFigures(
                name=deployment.name,
                arrived=deployment.arrived,
                replicas=len(deployment.replicas),
                waiting=len(deployment.queue),
                peak_replicas=deployment.most,
                cold_starts=deployment.cold_starts,
                scaled_to_zero_s=deployment.at_zero_until_s(self.now_s),
                limits=None if deployment.latest is None else deployment.latest.steps.limits,
            )
            for deployment in self._deployments.by_name.values()
        )
        if self.stopped is None:
            self.advance(math.inf)
        self.requests.fail_unfinished(Failure.INTERRUPTED)
        end_s = self.now_s
        return SimulationResult(
            outcomes=self.requests.outcomes(tuple(self._deployments.by_name), self._scenario.overhead_s),
            changes=tuple(self._deployments.changes),
            gpus=tuple(
                GpuFigures(
                    node_id=gpu.node_id,
                    device_id=gpu.device_id,
                    busy_fraction=gpu.busy_s(end_s) / end_s if end_s else 0.0,
                    held_fraction=gpu.held_s(end_s) / end_s if end_s else 0.0,
                    peak_bytes=gpu.peak_bytes,
                    total_bytes=gpu.total_bytes,
                )
                for gpu in self._cluster.gpus.values()
            ),
            deployments=tuple(self._at_the_end(each, end_s) for each in figures),
            held=self._cluster.held(end_s),
            end_s=end_s,
            stopped=self.stopped,
        )

    def _at_the_end(self, figures: DeploymentFigures, end_s: float) -> DeploymentFigures:
        deployment = self._deployments.by_name[figures.name]
        variants = None if deployment.traffic is None else deployment.traffic.figures()
        return replace(figures, kv=kv_use(deployment.kv_meters, end_s), variants=variants)

    def _act(self, action: Action) -> None:
        deployments, now_s = self._deployments, self.now_s
        match action:
            case Deploy():
                deployments.deploy(action, now_s)
            case Remove(name=name):
                deployments.remove(name, now_s)
            case NodeFails(node_id=node):
                deployments.node_fails(node, now_s)
            case NodeReturns(node_id=node):
                deployments.node_returns(node, now_s)
            case Profile():
                deployments.profile(action, now_s)

    def _overload(self, deployment: Deployment) -> str:
        now_s = self.now_s
        rows = [row for row, of in enumerate(self.requests.deployment) if of == deployment.index]
        answered = sum(self.requests.last_s[row] == self.requests.last_s[row] for row in rows)
        since_s = now_s - self.requests.arrival_s[rows[0]]
        rate = (
            f", {len(rows) / since_s:.4g} requests/s arrived and {answered / since_s:.4g} were answered"
            if since_s
            else ""
        )
        waiting = len(deployment.queue)
        return (
            f"stopped at {now_s:.1f} s: {waiting} requests wait for {deployment.name}{rate}; the rate is beyond "
            "what it serves: lower it, add replicas or GPUs, or bound the queue"
        )
