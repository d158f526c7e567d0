"""The running installation, for commands that need one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from daemon.process import is_alive, read_record
from fingerprint.errors import UnavailableError
from iserve.settings import Settings, load_settings

if TYPE_CHECKING:
    from iserve.client import ControllerClient
    from iserve.plan_document import PlanDocument
    from iserve.planning import PlanOptions

__all__ = ["client", "gateway_url", "live_plan", "model_argument", "registered_models"]


def client(settings: Settings | None = None, *, start: bool = True) -> ControllerClient:
    """This home's controller, started when ``start``."""
    from iserve.client import connect

    return connect(settings or load_settings(), start=start)


def model_argument(model: str) -> str:
    """A folder becomes absolute: the controller has another working directory."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def registered_models(model: str) -> dict[str, Path]:
    """The registered models and the demo, when ``model`` can be a registered name; no controller is needed."""
    from iserve.demo import DEMO_MODEL_NAME, demo_model_path

    settings = load_settings()
    if "/" in model or not (settings.home / "state.db").exists():
        return {DEMO_MODEL_NAME: demo_model_path()}
    from iserve.state.store import Store

    store = Store.read_only(settings.home / "state.db")
    try:
        return {DEMO_MODEL_NAME: demo_model_path()} | {m.name: Path(m.directory) for m in store.models()}
    finally:
        store.close()


def gateway_url() -> str:
    """Where the OpenAI API of this home answers.

    Raises:
        UnavailableError: no gateway runs.
    """
    settings = load_settings()
    record = read_record(settings.run_folder / "gateway.json")
    if record is None or not is_alive(record):
        raise UnavailableError(f"no gateway runs on {settings.home}; `iserve up` starts it")
    return record.url


def live_plan(model: str, options: PlanOptions, engine: str) -> PlanDocument:
    """A plan for the devices that are free here, by the stored profile."""
    from iserve.api_types import PlanBody, SloBody
    from iserve.plan_document import PlanDocument

    intent, work, slo = options.intent, options.workload, options.intent.slo
    body = PlanBody(
        model=model_argument(model),
        intent=intent.kind,
        cost=intent.cost_model,
        slo=None if slo is None else SloBody(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, e2e_s=slo.e2e_s),
        percentile=intent.percentile,
        rate_per_s=intent.rate_per_s,
        quality=intent.quality,
        budget=intent.budget,
        input_tokens=work.input_tokens,
        output_tokens=work.output_tokens,
        batch=work.batch,
        engine=engine,
        policy=options.policy,
    )
    return client().post("/api/v1/plans", body.model_dump(mode="json"), PlanDocument)
