"""Joint plan in words: the load it was judged at, its forecast, and the rule's plan at the same load."""

from __future__ import annotations

from iserve.planning.document import JointForecast, JointPlanDocument
from iserve.planning.words import seconds

__all__ = ["joint_lines"]


def joint_lines(joint: JointPlanDocument) -> list[tuple[str, str]]:
    """Return labels and texts."""
    chosen, rule = joint.forecast, joint.rule
    mean = "there" if joint.rate_per_s is not None else "at their mean"
    lines = [("Under load", f"{_load_words(joint)}; {mean} {_forecast_words(chosen)}{_kv_words(joint)}")]
    if joint.neighbours:
        known = f"the rate of {joint.neighbour_rates} known" if joint.neighbour_rates else "no rate of them known"
        count = "1 deployment that runs" if joint.neighbours == 1 else f"{joint.neighbours} deployments that run"
        lines.append(
            ("", f"next to {count}, {known}; on its GPUs they make it {chosen.slowdown:.3g} times as slow")
        )
    what = "fewest GPUs that hold it, one replica, on the idlest GPUs"
    if joint.is_rule:
        return [*lines, ("The rule", f"{what}: this plan; none was found that is better by 2%")]
    gained = _gain_words(joint)
    return [*lines, ("The rule", f"{what}: tp={rule.config.tp}, {_forecast_words(rule)}{gained}")]


def _load_words(joint: JointPlanDocument) -> str:
    if joint.rate_per_s is not None:
        return f"judged at {joint.rate_per_s:g} requests/s, and at up to 2.5 times that"
    low, high = min(joint.utilisations), max(joint.utilisations)
    return f"no rate is known (--rate gives it), judged at {low:.0%} to {high:.0%} of what its GPUs carry"


def _forecast_words(found: JointForecast) -> str:
    number = "1 replica" if found.replicas == 1 else f"{found.replicas} replicas"
    mean = "no place" if found.e2e_s is None else f"mean request {seconds(found.e2e_s)}"
    worth = "1 GPU's worth" if f"{found.gpus_held:.2g}" == "1" else f"{found.gpus_held:.2g} GPUs' worth"
    return f"{number}, {mean}, {worth} held"


def _kv_words(joint: JointPlanDocument) -> str:
    if not joint.kv_tokens:
        return ""
    low, high = min(joint.kv_tokens), max(joint.kv_tokens)
    tokens = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    each = " each" if len(joint.kv_tokens) > 1 else ""
    return f", {tokens} tokens of KV cache{each}, as {joint.service.batch_of(low):.0f} mean requests take"


def _gain_words(joint: JointPlanDocument) -> str:
    """Return how much the plan gains over the rule by its goal; empty where that is no gain."""
    chosen, rule = joint.forecast, joint.rule
    if rule.utilisation > 1:
        return ", which does not serve that"
    if joint.goal != "latency" and chosen.gpus_held > rule.gpus_held:
        return ", which does not keep the promised time"
    if joint.goal != "latency":
        return f"; this plan holds {chosen.gpus_held / rule.gpus_held - 1:+.0%}" if rule.gpus_held else ""
    if chosen.e2e_s is None or rule.e2e_s is None:
        return ""
    return f"; this plan takes {chosen.e2e_s / rule.e2e_s - 1:+.0%}"
