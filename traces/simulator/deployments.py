"""What is deployed under which name: replicas come by the planner's decision and go with their nodes.

A replica that was refused, or lost with its node, is asked for again whenever memory has become free (a node is
back, a deployment or a profile is gone), oldest first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from traces.outcomes import Failure
from traces.simulator.cluster import Cluster
from traces.simulator.continuous import ContinuousWorker
from traces.simulator.faults import PolicyFault, ask
from traces.simulator.fcfs import FcfsWorker
from traces.simulator.gpus import Gpu
from traces.simulator.requests import Requests
from traces.simulator.result import Change, ChangeKind
from traces.simulator.scenario import Deploy, Deployed, NotDeployed, Policies, Profile, Scenario, Service
from traces.simulator.servers import Job, Server, Stage
from traces.simulator.stepped import SteppedWorker

__all__ = ["Deployment", "Deployments"]


@dataclass(slots=True)
class Deployment:
    """``queue``: rows that wait, in the order of their arrival, while every replica has as many as it may have."""

    index: int
    name: str
    model: str
    replicas: list[Server] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    missing: int = 0
    turn: int = 0
    arrived: int = 0


class Deployments:
    """All of one simulation. ``changes`` tells what happened to them."""

    def __init__(self, scenario: Scenario, policies: Policies, cluster: Cluster, requests: Requests) -> None:
        self._scenario, self._policies = scenario, policies
        self._cluster, self._requests = cluster, requests
        names = [action for action in scenario.actions if isinstance(action, Deploy)]
        self.by_name = {a.name: Deployment(i, a.name, a.model) for i, a in enumerate(names)}
        self.changes: list[Change] = []
        self._of: dict[Server, Deployment] = {}
        self._profiles: list[Profile] = []  # that wait for spare memory
        self._made = 0

    def deploy(self, action: Deploy, now_s: float) -> None:
        deployment = self.by_name[action.name]
        deployment.missing = action.replicas
        self._fill(deployment, now_s)

    def remove(self, name: str, now_s: float) -> None:
        deployment = self.by_name[name]
        deployment.missing = 0
        rows = [row for server in tuple(deployment.replicas) for part in self._end(server, now_s) for row in part]
        self._drop(deployment, [*rows, *deployment.queue])
        self._tell(now_s, ChangeKind.REMOVED, name, "taken down")
        self.retry(now_s)

    def node_fails(self, node_id: str, now_s: float) -> None:
        """All that has a GPU there ends. Deployments are planned again at once, without the node; then requests
        that waited go to the replicas that are left, or are not served where there is none."""
        self._cluster.dead_nodes.add(node_id)
        orphans: dict[str, list[int]] = {}
        for server in self._cluster.servers:
            if not self._cluster.on_node(server, node_id):
                continue
            if isinstance(server, Job):
                self._cluster.remove(server, now_s)
                self._tell(
                    now_s, ChangeKind.LOST, server.name, f"{node_id} failed; the profile is not taken again"
                )
                continue
            deployment = self._of[server]
            running, waiting = self._end(server, now_s)
            for row in running:
                self._requests.fail(row, Failure.CONNECTION_LOST)
            orphans.setdefault(deployment.name, []).extend(waiting)
            deployment.missing += 1
            self._tell(now_s, ChangeKind.LOST, deployment.name, f"{node_id} failed under {server.name}")
        for name, rows in orphans.items():
            deployment = self.by_name[name]
            deployment.queue = deque(sorted([*rows, *deployment.queue]))
        self.retry(now_s)
        for name in orphans:
            self.pass_on(self.by_name[name], now_s)

    def node_returns(self, node_id: str, now_s: float) -> None:
        self._cluster.dead_nodes.discard(node_id)
        self.retry(now_s)

    def profile(self, action: Profile, now_s: float) -> None:
        """On spare memory, or later when there is some."""
        snapshot = self._cluster.snapshot(now_s)
        state = ask("harvest", lambda: self._policies.harvest(snapshot, action.memory_bytes))
        if state is None:
            self._profiles.append(action)
            self._tell(now_s, ChangeKind.REFUSED, action.name, "no GPU has the spare memory for its profile now")
            return
        gpu = self._cluster.gpu(state)
        job = Job(action.name, [Stage((gpu,), 1.0)], now_s, action.work_s)
        ask("harvest", lambda: self._cluster.add(job, [(gpu, action.memory_bytes)]))
        self._tell(now_s, ChangeKind.PROFILING, action.name, "on spare memory", ((gpu, action.memory_bytes),))

    def profiled(self, job: Job, now_s: float) -> None:
        self._cluster.remove(job, now_s)
        self._tell(now_s, ChangeKind.PROFILED, job.name, "its memory is free again")
        self.retry(now_s)

    def retry(self, now_s: float) -> None:
        """Ask again for what has no place: there may be more memory than before."""
        for deployment in self.by_name.values():
            if deployment.missing:
                self._fill(deployment, now_s)
        waiting, self._profiles = self._profiles, []
        for action in waiting:
            self.profile(action, now_s)

    def arrive(self, deployment: Deployment, row: int, now_s: float) -> None:
        """As in the gateway: to a replica with room, or to the end of the queue, or refused."""
        replicas = deployment.replicas
        if not replicas:
            self._requests.fail(row, Failure.NOT_SERVED)
        elif self._requests.input_tokens[row] + self._requests.output_tokens[row] > replicas[0].longest:
            self._requests.fail(row, Failure.BAD_REQUEST)
        elif not deployment.queue and self._give(deployment, row, now_s):
            pass
        elif self._scenario.max_waiting is not None and len(deployment.queue) >= self._scenario.max_waiting:
            self._requests.fail(row, Failure.RATE_LIMITED)
        else:
            deployment.queue.append(row)

    def pass_on(self, deployment: Deployment, now_s: float) -> None:
        """Give those that wait longest to the replicas that have room; where none is left, nobody is served."""
        queue = deployment.queue
        if not deployment.replicas:
            self._drop(deployment, list(queue))
        while queue and self._give(deployment, queue[0], now_s):
            queue.popleft()

    def of(self, server: Server) -> Deployment | None:
        """Whose replica it is; None: nobody's (any more)."""
        return self._of.get(server)

    def _give(self, deployment: Deployment, row: int, now_s: float) -> bool:
        """To the replica that the router chooses among those with room; False: there is none."""
        replicas = deployment.replicas
        if len(replicas) == 1:
            server = replicas[0]
            if server.outstanding >= server.max_outstanding:
                return False
        else:
            roomy = [server for server in replicas if server.outstanding < server.max_outstanding]
            if not roomy:
                return False
            server = roomy[self._choose(deployment, roomy)]
        server.last_turn = deployment.turn
        deployment.turn += 1
        server.submit(row, self._requests.input_tokens[row], self._requests.output_tokens[row])
        if server.busy:
            if server.cuts:
                self._cluster.cut(server, now_s)
        elif not server.queued:
            self._cluster.schedule(server, now_s)
        return True

    def _choose(self, deployment: Deployment, roomy: list[Server]) -> int:
        router, turn = self._policies.router, deployment.turn
        chosen = ask(router.name, lambda: router.choose(roomy, turn))
        if not 0 <= chosen < len(roomy):
            raise PolicyFault(
                router.name, f"chose replica {chosen}; {deployment.name} has {len(roomy)} with room, from 0 on"
            )
        return chosen

    def _drop(self, deployment: Deployment, rows: list[int]) -> None:
        for row in rows:
            self._requests.fail(row, Failure.NOT_SERVED)
        deployment.queue.clear()

    def _fill(self, deployment: Deployment, now_s: float) -> None:
        """One replica after the other, each on the cluster that the one before left."""
        deployer = self._policies.deployer
        while deployment.missing:
            snapshot = self._cluster.snapshot(now_s)
            if not snapshot.gpus:
                answer: Deployed | NotDeployed = NotDeployed(reason="no GPU is left")
            else:
                answer = ask(deployer.name, lambda: deployer(deployment.model, snapshot))  # noqa: B023
            if isinstance(answer, NotDeployed):
                self._tell(now_s, ChangeKind.REFUSED, deployment.name, answer.reason)
                return
            self._launch(deployment, answer, now_s)

    def _launch(self, deployment: Deployment, decided: Deployed, now_s: float) -> None:
        self._made += 1
        deployer = self._policies.deployer.name
        stages = ask(deployer, lambda: self._cluster.stages(decided.placement))
        server = self._worker(f"{deployment.name}#{self._made}", stages, decided, now_s + self._scenario.startup_s)
        memory = [
            (gpu, placed.bytes_per_gpu)
            for stage, placed in zip(stages, decided.placement.stages, strict=True)
            for gpu in stage.gpus
        ]
        ask(deployer, lambda: self._cluster.add(server, memory))
        server.max_outstanding = self._scenario.outstanding_per_slot * server.max_batch
        self._of[server] = deployment
        deployment.replicas.append(server)
        deployment.missing -= 1
        self._tell(now_s, ChangeKind.DEPLOYED, deployment.name, decided.what, tuple(memory))
        self.pass_on(deployment, now_s)

    def _worker(self, name: str, stages: list[Stage], decided: Deployed, ready_s: float) -> Server:
        args = (name, stages, ready_s, decided.steps, self._requests)
        match self._scenario.service:
            case Service.FCFS:
                return FcfsWorker(*args)
            case Service.CONTINUOUS:
                return ContinuousWorker(*args)
            case Service.STEPPED:
                make = self._policies.make_batcher
                assert make is not None, "checked before the simulation began"
                return SteppedWorker(*args, make(decided.steps.limits))

    def _end(self, server: Server, now_s: float) -> tuple[list[int], list[int]]:
        self._cluster.remove(server, now_s)
        self._of.pop(server).replicas.remove(server)
        return server.clear()

    def _tell(
        self, now_s: float, kind: ChangeKind, name: str, text: str, memory: tuple[tuple[Gpu, int], ...] = ()
    ) -> None:
        self.changes.append(
            Change(
                at_s=now_s,
                kind=kind,
                name=name,
                text=text,
                device_ids=tuple(gpu.device_id for gpu, _ in memory),
                memory_bytes=sum(size for _, size in memory),
            )
        )
