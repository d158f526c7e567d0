"""Deployments by name: the planner decides their replicas, which are lost with their nodes.

A replica that was refused, or lost with its node, is asked for again whenever memory has become free (a node is
back, a deployment or a profile is gone), oldest first.

The actions of a cluster policy are carried out here too: another number of replicas, one that drains, some that
move. The moves of one look are one transaction: memory for all is taken at once, all take over at the same time,
and where one cannot, none does. A deployment whose replicas were all scaled away is scaled to zero: requests wait
for it, and the policy is asked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain

from placement.actions import ClusterAction, Drain, Move, Scale
from placement.types import ClusterSnapshot
from planner.admission import AdmissionPolicy
from traces.outcomes import Failure
from traces.simulator.adapter_workers import AdapterServer
from traces.simulator.admission import SimulatedAdmission
from traces.simulator.cluster import Cluster
from traces.simulator.deployment_state import Deployment, moved, snapshot_without, states
from traces.simulator.dispatch import Dispatch
from traces.simulator.gpus import Gpu
from traces.simulator.policy_errors import PolicyFault, ask
from traces.simulator.requests import Requests
from traces.simulator.result import Change, ChangeKind
from traces.simulator.scenario import (
    Deploy,
    Deployed,
    NotDeployed,
    Policies,
    Profile,
    ReplicaDeployer,
    Scenario,
)
from traces.simulator.worker_kinds import new_worker
from traces.simulator.workers import Job, Server, Stage

__all__ = ["Deployment", "Deployments"]


class Deployments:
    """All of one simulation. ``changes`` tells what happened to them."""

    def __init__(self, scenario: Scenario, policies: Policies, cluster: Cluster, requests: Requests) -> None:
        self._scenario, self._policies = scenario, policies
        self._cluster, self._requests = cluster, requests
        names = [action for action in scenario.actions if isinstance(action, Deploy)]
        self.by_name = {a.name: Deployment(i, a.name, a.model) for i, a in enumerate(names)}
        self._with_variants = frozenset(scenario.variants.values())
        self.changes: list[Change] = []
        self._of: dict[Server, Deployment] = {}
        self._profiles: list[Profile] = []  # that wait for spare memory
        self._plans: dict[Server, tuple[Server, ...]] = {}  # replacement that is loaded -> all of its look
        self._made = 0
        self.dispatch = Dispatch(scenario, policies, cluster, requests, self.steer)

    def deploy(self, action: Deploy, now_s: float) -> None:
        deployment = self.by_name[action.name]
        deployment.missing = action.replicas
        deployment.born_s = deployment.since_s = deployment.last_s = now_s
        self._fill(deployment, now_s)

    def remove(self, name: str, now_s: float) -> None:
        deployment = self.by_name[name]
        deployment.missing = 0
        deployment.leave_zero(now_s)
        self._stop_moves(deployment, now_s)
        servers = (*deployment.replicas, *deployment.draining)
        rows = [row for server in servers for part in self._end(server, now_s) for row in part]
        self.dispatch.drop(deployment, [*rows, *deployment.queue])
        self._tell(now_s, ChangeKind.REMOVED, name, "taken down")
        self.retry(now_s)

    def node_fails(self, node_id: str, now_s: float) -> None:
        """End all that has a GPU on a failed node, and plan its deployments again at once, without the node.

        Requests that waited then go to the replicas that are left, or are not served where there is none.
        """
        self._cluster.dead_nodes.add(node_id)
        orphans: dict[str, list[int]] = {}
        for server in [each for each in self._cluster.servers if self._cluster.on_node(each, node_id)]:
            if isinstance(server, Job):
                self._cluster.remove(server, now_s)
                self._tell(
                    now_s, ChangeKind.LOST, server.name, f"{node_id} failed; the profile is not taken again"
                )
                continue
            if server not in self._of:  # its move was given up with one that is lost
                continue
            deployment = self._of[server]
            # One that drains was to go; one that was to be replaced is; a replacement is not waited for any more.
            coming = deployment.coming
            if server in coming:
                deployment.missing += coming[server] not in deployment.replicas
            else:
                deployment.missing += server in deployment.replicas and server not in coming.values()
            running, waiting = self._end(server, now_s)
            for row in running:
                self._requests.fail(row, Failure.CONNECTION_LOST)
            orphans.setdefault(deployment.name, []).extend(waiting)
            self._tell(now_s, ChangeKind.LOST, deployment.name, f"{node_id} failed under {server.name}")
        for name, rows in orphans.items():
            deployment = self.by_name[name]
            deployment.queue = deque(sorted([*rows, *deployment.queue]))
        self.retry(now_s)
        for name in orphans:
            self.dispatch.pass_on(self.by_name[name], now_s)

    def node_returns(self, node_id: str, now_s: float) -> None:
        self._cluster.dead_nodes.discard(node_id)
        self.retry(now_s)

    def profile(self, action: Profile, now_s: float) -> None:
        """Start a profile on spare memory, or later when there is some."""
        snapshot = self.snapshot(now_s)
        state = ask("harvest", lambda: self._policies.harvest(snapshot, action.memory_bytes))
        if state is None:
            self._profiles.append(action)
            self._tell(now_s, ChangeKind.REFUSED, action.name, "no GPU has the spare memory for its profile now")
            return
        gpu = self._cluster.gpu(state)
        job = Job(action.name, [Stage((gpu,), 1.0, is_group=False)], now_s, action.work_s)
        ask("harvest", lambda: self._cluster.add(job, [(gpu, action.memory_bytes)], now_s))
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

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """Return what policies see: GPUs, and what is deployed on them."""
        gpus = self._cluster.snapshot(now_s).gpus
        return ClusterSnapshot(gpus, states(self.by_name.values(), self._requests, now_s))

    @property
    def work_left(self) -> bool:
        """True while a request waits or runs."""
        return any(
            d.queue or d.draining or any(server.outstanding for server in d.replicas)
            for d in self.by_name.values()
        )

    def steer(self, now_s: float) -> bool:
        """Carry out what the cluster policy asks for; return whether it asked for anything."""
        cluster_policy = self._policies.cluster_policy
        assert cluster_policy is not None, "asked for only where there is one"
        snapshot = self.snapshot(now_s)
        actions = ask(cluster_policy.name, lambda: tuple(cluster_policy(snapshot)))
        moves = [action for action in actions if isinstance(action, Move)]
        for action in actions:
            if not isinstance(action, Move):
                self._carry_out(action, cluster_policy.name, now_s)
            elif moves:
                self._move(moves, cluster_policy.name, now_s)
                moves = []
        return bool(actions)

    def turn(self, server: Server, now_s: float) -> None:
        """Handle ``server`` at a run's end or when ready: it may be drained, or take over for another."""
        deployment = self._of[server]
        if server in deployment.draining and not server.outstanding:
            self._through(deployment, server, now_s)
        elif server in deployment.coming:
            replaced = deployment.coming.pop(server)
            self._plans.pop(server)
            deployment.replicas.append(server)
            self._tell(now_s, ChangeKind.MOVED, deployment.name, f"{server.name} takes over")
            if replaced in deployment.replicas:
                self._drain(deployment, replaced, now_s)
            self.dispatch.pass_on(deployment, now_s)

    def _carry_out(self, action: Scale | Drain, policy: str, now_s: float) -> None:
        if isinstance(action, Scale):
            if action.replicas < 0:
                raise PolicyFault(policy, f"ordered {action}; there is no negative number of replicas")
            self._scale(self._named(action, policy), action.replicas, now_s)
            return
        deployment, server = self._replica(action, policy)
        if len(deployment.replicas) == 1:
            raise PolicyFault(policy, f"ordered {action}; it is the last replica, which is scaled, not drained")
        self._drain(deployment, server, now_s, evict=action.evict)

    def _named(self, action: ClusterAction, policy: str) -> Deployment:
        deployment = self.by_name.get(action.name)
        if deployment is None or deployment.latest is None:
            raise PolicyFault(policy, f"ordered {action}; nothing is deployed under that name")
        return deployment

    def _replica(self, action: Drain | Move, policy: str) -> tuple[Deployment, Server]:
        deployment = self._named(action, policy)
        server = next((r for r in deployment.replicas if r.name == action.replica_id), None)
        if server is None:
            raise PolicyFault(policy, f"ordered {action}; there is no such replica")
        return deployment, server

    def _scale(self, deployment: Deployment, replicas: int, now_s: float) -> None:
        if replicas == deployment.wanted:
            return
        self._tell(now_s, ChangeKind.SCALED, deployment.name, f"from {deployment.wanted} to {replicas} replicas")
        deployment.since_s = now_s
        deployment.missing = max(0, replicas - len(deployment.replicas))
        if not replicas:
            deployment.scale_to_zero(now_s)
        for server in deployment.replicas[replicas:][::-1]:
            self._drain(deployment, server, now_s)
        self._fill(deployment, now_s)

    def _drain(self, deployment: Deployment, server: Server, now_s: float, *, evict: bool = False) -> None:
        deployment.replicas.remove(server)
        deployment.since_s = now_s
        self._stop_moves(deployment, now_s, of=server)
        rows = server.give_back()
        if evict:
            for row, input_tokens, output_tokens in server.evict(server.done_s(now_s) if server.busy else 0.0):
                self.dispatch.left[row] = (input_tokens, output_tokens)
                rows.append(row)
        if deployment.traffic is not None:
            deployment.traffic.remove(server, rows)
        self._tell(now_s, ChangeKind.DRAINING, deployment.name, f"{server.name} takes no more requests")
        deployment.draining.append(server)
        if not server.outstanding:
            self._through(deployment, server, now_s)
        deployment.queue = deque(sorted([*rows, *deployment.queue]))
        self.dispatch.pass_on(deployment, now_s)

    def _through(self, deployment: Deployment, server: Server, now_s: float) -> None:
        self._end(server, now_s)
        self._tell(now_s, ChangeKind.ENDED, deployment.name, f"{server.name} has ended, its memory is free")
        self.retry(now_s)

    def _move(self, actions: Sequence[Move], policy: str, now_s: float) -> None:
        """Start the replacements of all moves of one look; they take over together, once the last is loaded.

        Raises:
            PolicyFault: one cannot be made, or all places together have too little room; none is started then.
        """
        decided: dict[Server, Deployed] = {}
        load_s = 0.0
        for action in actions:
            deployment, server = self._replica(action, policy)
            if server in decided or server in deployment.coming.values():
                raise PolicyFault(policy, f"ordered {action}; it moves already")
            decided[server] = moved(deployment.decided[server], action, policy)
            load_s = max(load_s, action.load_s, self._startup_s(decided[server]))
        places = [there.placement for there in decided.values()]
        ask(policy, lambda: self._cluster.check_room(chain.from_iterable(map(self._cluster.memory, places))))
        new: list[Server] = []
        for server, there in decided.items():
            deployment = self._of[server]
            replacement, memory = self._start(deployment, there, policy, now_s, now_s + load_s)
            new.append(replacement)
            deployment.coming[replacement] = server
            deployment.since_s = now_s
            text = f"{server.name} to {replacement.name}"
            self._tell(now_s, ChangeKind.MOVING, deployment.name, text, memory)
        self._plans.update(dict.fromkeys(new, tuple(new)))

    def _give_up(self, plan: Sequence[Server], now_s: float) -> None:
        """End the replacements of a plan of moves; one whose replica is lost stays, to take its place."""
        for server in plan:
            deployment = self._of.get(server)
            if deployment is not None and deployment.coming.get(server) in deployment.replicas:
                self._end(server, now_s)
                self._tell(now_s, ChangeKind.ENDED, deployment.name, f"{server.name}: its move is given up")

    def _stop_moves(self, deployment: Deployment, now_s: float, of: Server | None = None) -> None:
        """Stop the moves of all replicas of a deployment, or of one."""
        for new, replaced in tuple(deployment.coming.items()):
            if new in deployment.coming and (of is None or replaced is of):  # else given up with one before
                self._end(new, now_s)

    def of(self, server: Server) -> Deployment | None:
        """Return the deployment whose replica a server is; None: it is no replica any more."""
        return self._of.get(server)

    def _fill(self, deployment: Deployment, now_s: float) -> None:
        """Fill until all that are wanted are there, or the next finds no place on what those before left."""
        while deployment.missing:
            answer = self._decide(deployment, self.snapshot(now_s))
            if isinstance(answer, NotDeployed):
                self._tell(now_s, ChangeKind.REFUSED, deployment.name, answer.reason)
                return
            for decided in answer:
                self._launch(deployment, decided, now_s)

    def _decide(self, deployment: Deployment, snapshot: ClusterSnapshot) -> Sequence[Deployed] | NotDeployed:
        """Decide the next replica; all of them, if the deployer knows what replicas are and there is none."""
        deployer, model, missing = self._policies.deployer, deployment.model, deployment.missing
        if not snapshot.gpus:
            return NotDeployed(reason="no GPU is left")
        if not isinstance(deployer, ReplicaDeployer) or (missing == 1 and not deployment.decided):
            answer = ask(deployer.name, lambda: deployer(model, snapshot))
        elif not deployment.decided:
            return ask(deployer.name, lambda: deployer.several(model, snapshot, missing))
        else:
            others = snapshot_without(snapshot, (of.placement for of in deployment.decided.values()))
            if others is None:
                return NotDeployed(reason="every GPU holds one of its replicas already; two would share its time")
            like = deployment.latest
            assert like is not None, "it has replicas"
            answer = ask(deployer.name, lambda: deployer.another(like, model, others))
        return answer if isinstance(answer, NotDeployed) else (answer,)

    def _startup_s(self, decided: Deployed) -> float:
        """Return the seconds from the decision until a worker serves."""
        return decided.startup_s if self._scenario.startup_s is None else self._scenario.startup_s

    def _launch(self, deployment: Deployment, decided: Deployed, now_s: float) -> None:
        deployer = self._policies.deployer.name
        server, memory = self._start(deployment, decided, deployer, now_s, now_s + self._startup_s(decided))
        deployment.replicas.append(server)
        deployment.missing -= 1
        deployment.most = max(deployment.most, len(deployment.replicas))
        if (control := deployment.admission) and len(deployment.replicas) == 1:
            control.restart_waits(deployment.queue, server.ready_s)
        deployment.cold_starts += deployment.at_zero
        deployment.leave_zero(now_s)
        deployment.since_s = now_s
        self._tell(now_s, ChangeKind.DEPLOYED, deployment.name, decided.what, memory)
        self.dispatch.pass_on(deployment, now_s)

    def _start(
        self, deployment: Deployment, decided: Deployed, policy: str, now_s: float, ready_s: float
    ) -> tuple[Server, tuple[tuple[Gpu, int], ...]]:
        """Start a worker with its memory, before requests are routed to it; ``policy`` is at fault if it has no
        room, or no slots for variants that are named.
        """
        if decided.adapters is None and deployment.name in self._with_variants:
            raise PolicyFault(policy, f"placed {deployment.name!r} without slots for its variants")
        rejects = deployment.name in self._scenario.reject_late
        if decided.adapters is not None and rejects and decided.forecast_service is None:
            raise PolicyFault(policy, f"placed {deployment.name!r} without times to forecast late requests by")
        self._made += 1
        stages = ask(policy, lambda: self._cluster.stages(decided.placement))
        name, make_batcher = f"{deployment.name}#{self._made}", self._policies.make_batcher
        args = (name, stages, ready_s, decided.steps, self._requests)
        make = partial(new_worker, pipelined=decided.pipelined, adapters=decided.adapters)
        server = ask(policy, lambda: make(self._scenario.service, args, make_batcher))
        server.holder = deployment.name
        memory = self._cluster.memory(decided.placement)
        ask(policy, lambda: self._cluster.add(server, memory, now_s))
        a_slot = 1 if deployment.name in self._scenario.reject_late else self._scenario.outstanding_per_slot
        server.max_outstanding = a_slot * server.at_once
        self._of[server] = deployment
        if server.kv is not None:
            deployment.kv_meters.append(server.kv)
        if isinstance(server, AdapterServer) and server.thread is not None:
            self._of[server.thread] = deployment
        deployment.decided[server] = deployment.latest = decided
        deployment.slots = server.max_batch
        slo, service = self._scenario.reject_late.get(deployment.name), decided.forecast_service
        if slo and service and deployment.admission is None and self._scenario.rejects_by_forecast:
            admission = AdmissionPolicy(slo=slo, service=service, slots=server.at_once)
            deployment.admission = SimulatedAdmission(admission, self._requests)
        if decided.adapters is not None:
            deployment.traffic = deployment.traffic or self.dispatch.new_traffic(deployment, decided.adapters)
            deployment.traffic.enter(server)
        return server, memory

    def _end(self, server: Server, now_s: float) -> tuple[list[int], list[int]]:
        """Remove a server that is gone, and its successor of a move; a server that it was to replace stays."""
        self._cluster.remove(server, now_s)
        deployment = self._of.pop(server)
        if isinstance(server, AdapterServer) and server.thread is not None:
            self._of.pop(server.thread)
            server.thread.version += 1  # a load under way ends with it
        deployment.decided.pop(server)
        deployment.since_s = now_s
        if server.kv is not None:
            server.kv.until_s = now_s
        deployment.coming.pop(server, None)
        for held in (deployment.replicas, deployment.draining):
            if server in held:
                held.remove(server)
        self._give_up(self._plans.pop(server, ()), now_s)
        running, waiting = server.clear()
        if deployment.traffic is not None:
            deployment.traffic.remove(server, waiting)
        return running, waiting

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
