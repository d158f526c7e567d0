"""Plans that a search starts from: the plain rule, and the rule with the idle GPUs used in one way or another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from placement.fleet.memory import kv_room
from placement.fleet.types import Fleet, FleetPlan, FleetReplica, plainness

__all__ = ["fixed_plan", "more_replicas", "more_split", "most_replicas", "most_split", "rule_plan"]


def fixed_plan(fleet: Fleet) -> FleetPlan:
    """Return the replicas that stay as they are."""
    return FleetPlan(tuple(replica for one in fleet.deployments for replica in one.fixed))


def rule_plan(fleet: Fleet) -> FleetPlan:
    """Return the plan of the rule: fewest GPUs that hold the model, one replica, spread out.

    The largest deployments choose first, each the emptiest group of GPUs that still has room. One that finds no
    room is left out.
    """

    def size_bytes(number: int) -> int:
        option = fleet.least(number)
        return option.num_gpus * option.bytes_per_gpu(option.longest_tokens)

    plan = fixed_plan(fleet)
    new = [number for number, deployment in enumerate(fleet.deployments) if not deployment.fixed]
    for number in sorted(new, key=size_bytes, reverse=True):
        plan = next(_placements(fleet, plan, number), plan)
    return plan


def _placements(fleet: Fleet, plan: FleetPlan, deployment: int) -> Iterator[FleetPlan]:
    """Yield ``plan`` with one replica of a deployment, the plainest option first."""
    options = fleet.deployments[deployment].options
    for option in sorted(range(len(options)), key=lambda o: (plainness(options[o]), options[o].alone_s)):
        for group in emptiest(fleet, plan, options[option].num_gpus):
            added = plan.adding(FleetReplica(deployment, option, group))
            if kv_room(fleet, added) is not None:
                yield added


def emptiest(fleet: Fleet, plan: FleetPlan, size: int) -> list[tuple[int, ...]]:
    """Return the groups of ``size`` GPUs, the idlest first, of equals those with the fewest replicas and bytes."""
    tenants: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for replica in plan.replicas:
        for gpu in replica.gpus:
            tenants[gpu] += 1
            taken[gpu] += fleet.option(replica).fixed_bytes
    tenants.update(fleet.held_by_unknown)
    return sorted(
        fleet.groups[size],
        key=lambda group: (
            max(fleet.gpus[gpu].busy for gpu in group),
            max(tenants[gpu] for gpu in group),
            max(taken[gpu] for gpu in group),
            group,
        ),
    )


def _idle(plan: FleetPlan, group: tuple[int, ...]) -> bool:
    held = {gpu for replica in plan.replicas for gpu in replica.gpus}
    return not held.intersection(group)


def more_replicas(fleet: Fleet, plan: FleetPlan) -> FleetPlan:
    """Return ``plan`` with idle GPUs as further replicas of the deployments in turn."""
    added = True
    while added:
        added = False
        for number, deployment in enumerate(fleet.deployments):
            own = plan.of(number)
            if not own or len(own) == deployment.most_replicas:
                continue
            size = len(own[0].gpus)
            group = next((g for g in fleet.groups[size] if _idle(plan, g)), None)
            if group is not None:
                plan, added = plan.adding(FleetReplica(number, own[0].option, group)), True
    return plan


def more_split(fleet: Fleet, plan: FleetPlan) -> FleetPlan:
    """Return ``plan`` with replicas over twice as many GPUs, again and again, where these are idle."""
    changed = True
    while changed:
        changed = False
        for replica in plan.replicas:
            if replica in fleet.deployments[replica.deployment].fixed:
                continue
            wider = _wider(fleet, plan, replica)
            if wider is not None:
                plan, changed = plan.without(replica).adding(wider), True
    return plan


def _wider(fleet: Fleet, plan: FleetPlan, replica: FleetReplica) -> FleetReplica | None:
    options = fleet.deployments[replica.deployment].options
    size = 2 * len(replica.gpus)
    option = next((o for o, one in enumerate(options) if one.num_gpus == size), None)
    if option is None:
        return None
    rest = plan.without(replica)
    around = [group for group in fleet.groups[size] if set(replica.gpus) <= set(group)]
    for group in (*around, *fleet.groups[size]):
        if _idle(rest, group):
            return FleetReplica(replica.deployment, option, group)
    return None


def most_split(fleet: Fleet) -> FleetPlan:
    """Return one replica of each deployment over as many GPUs as an option has, sharing them."""
    plan = fixed_plan(fleet)
    for number, deployment in enumerate(fleet.deployments):
        if deployment.fixed:
            continue
        options = deployment.options
        for option in sorted(range(len(options)), key=lambda o: -options[o].num_gpus):
            groups = emptiest(fleet, plan, options[option].num_gpus)
            found = next(
                (
                    added
                    for group in groups
                    if kv_room(fleet, added := plan.adding(FleetReplica(number, option, group))) is not None
                ),
                None,
            )
            if found is not None:
                plan = found
                break
    return plan


def most_replicas(fleet: Fleet, option: int) -> FleetPlan | None:
    """Return as many replicas of the first deployment as fit, on GPUs of their own, of one option; None: none."""
    size = fleet.deployments[0].options[option].num_gpus
    most, plan = fleet.deployments[0].most_replicas, fixed_plan(fleet)
    for group in emptiest(fleet, plan, size):
        if len(plan.of(0)) == most:
            break
        if any(set(group).intersection(one.gpus) for one in plan.of(0)):
            continue
        added = plan.adding(FleetReplica(0, option, group))
        if kv_room(fleet, added) is not None:
            plan = added
    return plan if plan.of(0) else None
