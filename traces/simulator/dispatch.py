"""Dispatch of requests to replicas as the gateway does it: routing, queues, and what is refused on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from traces.outcomes import Failure
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.adapter_workers import AdapterServer, LoadingThread
from traces.simulator.cluster import Cluster
from traces.simulator.deployment_state import Deployment, can_keep
from traces.simulator.policy_errors import PolicyFault, ask
from traces.simulator.requests import Requests
from traces.simulator.scenario import Policies, Scenario
from traces.simulator.variant_traffic import VariantTraffic
from traces.simulator.workers import Server

__all__ = ["Dispatch"]


class Dispatch:
    """Queues of all deployments.

    Args:
        ask_cluster_policy: called when a request waits for a deployment that is scaled to zero.
    """

    def __init__(
        self,
        scenario: Scenario,
        policies: Policies,
        cluster: Cluster,
        requests: Requests,
        ask_cluster_policy: Callable[[float], object],
    ) -> None:
        self._scenario, self._policies, self._ask_cluster_policy = scenario, policies, ask_cluster_policy
        self._cluster, self._requests = cluster, requests
        self.left: dict[int, tuple[int, int]] = {}  # rows that were moved: the tokens that were left of them

    def arrive(self, deployment: Deployment, row: int, now_s: float, variant: str | None = None) -> None:
        """Route a request as the gateway does: to a replica with room, to the end of the queue, or reject it."""
        replicas = deployment.replicas
        deployment.last_s = now_s
        if (traffic := deployment.traffic) is not None:
            traffic.arrive(row, variant, now_s)
        if not replicas:
            if deployment.at_zero:
                self._wait_at_zero(deployment, row, now_s)
            else:
                self._requests.fail(row, Failure.NOT_SERVED)
        elif self._requests.input_tokens[row] + self._requests.output_tokens[row] > replicas[0].longest:
            self._requests.fail(row, Failure.BAD_REQUEST)
        elif traffic is not None:
            self._arrive_among_variants(deployment, traffic, row, now_s)
        elif not deployment.queue and self._give(deployment, row, now_s):
            pass
        elif (control := deployment.admission) and not control.may_wait(row, replicas, deployment.queue, now_s):
            self._refuse(deployment, row)
        elif self._scenario.max_waiting is not None and len(deployment.queue) >= self._scenario.max_waiting:
            self._requests.fail(row, Failure.RATE_LIMITED)
        else:
            deployment.queue.append(row)

    def pass_on(self, deployment: Deployment, now_s: float) -> None:
        """Give the longest waiting requests to replicas with room; where no replica is left, fail all of them."""
        queue = deployment.queue
        if not deployment.replicas:
            if deployment.at_zero or deployment.coming:
                return
            self.drop(deployment, list(queue))
        if deployment.traffic is not None:
            self._serve(deployment, deployment.traffic, now_s)
            return
        while queue and self._give(deployment, queue[0], now_s):
            queue.popleft()

    def drop(self, deployment: Deployment, rows: Sequence[int]) -> None:
        """Fail ``rows`` of a deployment that has no replica, and empty its queue."""
        for row in rows:
            self._requests.fail(row, Failure.NOT_SERVED)
        deployment.queue.clear()

    def note(self, deployment: Deployment, server: Server, now_s: float) -> bool:
        """Note what a run of a replica with adapter slots has brought about; False: no more can be sent."""
        assert deployment.traffic is not None, "it has adapter slots"
        if isinstance(server, LoadingThread):
            released, server.released = server.released, []
            server = server.worker
            for waiting in released:  # each may end the worker's run, as one that is submitted
                server.release(waiting)
                self._wake(server, now_s)
        return isinstance(server, AdapterServer) and deployment.traffic.note(server, now_s)

    def new_traffic(self, deployment: Deployment, cost: AdapterCost) -> VariantTraffic:
        """Return the variants of a deployment, of which nothing is loaded yet."""
        return VariantTraffic(
            cost,
            self._policies.variant_policy,
            self._requests,
            registered=[
                name for name in self._scenario.registered if self._scenario.variants[name] == deployment.name
            ],
            choose=lambda rooms: self._choose(deployment, rooms),
            submit=lambda server, row, now_s: self._submit_among_variants(deployment, server, row, now_s),
            wake=self._wake,
            admission=deployment.admission,
            reject=lambda row: self._refuse(deployment, row),
            is_moved=self.left.__contains__,
        )

    def _arrive_among_variants(
        self, deployment: Deployment, traffic: VariantTraffic, row: int, now_s: float
    ) -> None:
        """Let the newest request be sent, perhaps before some that wait for a slot, or wait, or be rejected."""
        before = None if deployment.admission is None else tuple(deployment.queue)
        is_first = before is None or traffic.passes_all(row, before)
        if not is_first and not self._may_wait(deployment, traffic, row, before, now_s):
            return
        deployment.queue.append(row)
        self._serve(deployment, traffic, now_s)
        queue, bound = deployment.queue, self._scenario.max_waiting
        if not queue or queue[-1] != row:
            return
        if is_first and not self._may_wait(deployment, traffic, row, before, now_s):
            queue.pop()
        elif bound is not None and len(queue) > bound:
            queue.pop()
            traffic.forget(row)
            self._requests.fail(row, Failure.RATE_LIMITED)

    def _may_wait(
        self,
        deployment: Deployment,
        traffic: VariantTraffic,
        row: int,
        before: Sequence[int] | None,
        now_s: float,
    ) -> bool:
        """Return whether a request may wait behind ``before``, None: no request is late; else it is rejected."""
        if before is None or traffic.may_wait(row, deployment.replicas, before, now_s):
            return True
        traffic.forget(row)
        self._refuse(deployment, row)
        return False

    @staticmethod
    def _serve(deployment: Deployment, traffic: VariantTraffic, now_s: float) -> None:
        sent = traffic.serve(deployment.queue, deployment.replicas, now_s)
        if sent:
            deployment.queue = deque(row for row in deployment.queue if row not in sent)

    def _wait_at_zero(self, deployment: Deployment, row: int, now_s: float) -> None:
        """Queue a request of a deployment that is scaled to zero, and let the cluster policy decide at once."""
        bound = self._scenario.max_waiting
        if bound is not None and len(deployment.queue) >= bound:
            self._requests.fail(row, Failure.RATE_LIMITED)
            return
        deployment.queue.append(row)
        if not deployment.missing and self._policies.cluster_policy is not None:
            self._ask_cluster_policy(now_s)

    def _give(self, deployment: Deployment, row: int, now_s: float) -> bool:
        """Give a request to the replica that the router chooses among those with room, or reject it if it is too
        late.

        False: none has room.
        """
        replicas = deployment.replicas
        if len(replicas) == 1:
            server = replicas[0]
            if server.outstanding >= server.max_outstanding:
                return False
        else:
            roomy = [server for server in replicas if server.outstanding < server.max_outstanding]
            if not roomy:
                return False
            if (control := deployment.admission) and row not in self.left:
                roomy = [server for server in roomy if control.may_start(row, server, now_s)] or roomy
            server = roomy[self._choose(deployment, roomy)]
        if self._requests.input_tokens[row] + self._requests.output_tokens[row] > server.longest:
            self._refuse_too_long(deployment, server, row)
            return True
        if self._scenario.reject_late and self._too_late(deployment, server, row, now_s):
            self._refuse(deployment, row)
            return True
        if deployment.admission is not None:
            deployment.admission.record_start(row, server, now_s)
        self._submit(deployment, server, row, now_s)
        return True

    def _submit(self, deployment: Deployment, server: Server, row: int, now_s: float) -> None:
        server.last_turn = deployment.turn
        deployment.turn += 1
        if self.left and row in self.left:
            server.submit(row, *self.left[row])
        else:
            server.submit(row, self._requests.input_tokens[row], self._requests.output_tokens[row])
        if server.busy:  # as ``_wake``, which is a call more for each request
            if server.cuts:
                self._cluster.cut(server, now_s)
        elif not server.queued:
            self._cluster.schedule(server, now_s)

    def _wake(self, server: Server, now_s: float) -> None:
        """Let a replica see that it has more to do."""
        if server.busy:
            self._cluster.cut(server, now_s)
        elif not server.queued:
            self._cluster.schedule(server, max(now_s, server.ready_s))

    def _submit_among_variants(self, deployment: Deployment, server: Server, row: int, now_s: float) -> bool:
        """Submit a request to its replica; False: it is refused there."""
        if self._requests.input_tokens[row] + self._requests.output_tokens[row] > server.longest:
            self._refuse_too_long(deployment, server, row)
            return False
        self._submit(deployment, server, row, now_s)
        return True

    def _refuse_too_long(self, deployment: Deployment, server: Server, row: int) -> None:
        """Refuse a request that is too long for its replica: later ones may have found less room."""
        server.last_turn, deployment.turn = deployment.turn, deployment.turn + 1
        self._requests.fail(row, Failure.BAD_REQUEST)

    def _too_late(self, deployment: Deployment, server: Server, row: int, now_s: float) -> bool:
        """Return whether a request would miss its limits on a replica.

        Requests that already started on another replica are never rejected.
        """
        slo = self._scenario.reject_late.get(deployment.name)
        if slo is None or row in self.left:
            return False
        if deployment.admission is not None:
            return not deployment.admission.may_start(row, server, now_s)
        requests, steps = self._requests, deployment.decided[server].steps
        waited_s = max(now_s, server.ready_s) - requests.arrival_s[row] + self._scenario.overhead_s
        return not can_keep(slo, steps, waited_s, requests.input_tokens[row], requests.output_tokens[row])

    def _refuse(self, deployment: Deployment, row: int) -> None:
        self._requests.fail(row, Failure.TOO_LATE)
        if deployment.admission is not None:
            deployment.admission.record_rejection(row)

    def _choose(self, deployment: Deployment, roomy: Sequence[Server]) -> int:
        router, turn = self._policies.router, deployment.turn
        chosen = ask(router.name, lambda: router.choose(roomy, turn))
        if not 0 <= chosen < len(roomy):
            raise PolicyFault(
                router.name, f"chose replica {chosen}; {deployment.name} has {len(roomy)} with room, from 0 on"
            )
        return chosen
