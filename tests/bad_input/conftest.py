"""The REST API in this process: the real application, door and state; in place of the node's daemon one that tells
of two devices and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from daemon.client import DaemonClient
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.errors import EngineError, NotFoundError
from iserve.controller.app import create_app
from iserve.controller.service import Controller
from iserve.settings import PathList, Settings
from iserve.state.store import Store

T = TypeVar("T")

TOKEN = "the-token-of-this-home"


NODE = NodeStatus(
    node_id="n",
    observed_at=0.0,
    devices=tuple(
        DeviceStatus(
            device_id=f"cpu:{index}",
            index=index,
            kind="cpu",
            name="a core",
            total_bytes=2**33,
            free_bytes=2**33,
            load_fraction=0.0,
        )
        for index in range(2)
    ),
    workers=(),
)


class Daemon(DaemonClient):
    """Daemon with two devices and no worker, which starts none."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", "none")

    def _ask(self, method: str, path: str, kind: type[T], **_: object) -> T:
        if (method, path) == ("GET", "/v1/node"):
            assert isinstance(NODE, kind)
            return NODE
        if method == "POST":
            raise EngineError("nothing is started here")
        raise NotFoundError(f"no worker is at {path}")


@dataclass
class Api:
    """REST API of one home; ``ask`` is one request."""

    app: FastAPI
    client: TestClient
    controller: Controller
    folder: Path  # in which API keys may name models
    keys: dict[str, str] = field(default_factory=dict)

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str | None = TOKEN, **headers: str
    ) -> tuple[int, Any]:
        """Status and body."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        answer = self.client.request(method, path, json=body, headers=given)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status_code, answer.json() if is_json and answer.content else answer.text


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("models")
    settings = Settings(home=tmp_path_factory.mktemp("home"), model_folders=PathList([folder]))
    store = Store.open(settings.state, merged_folder=settings.merged_folder)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr(Controller, "daemon", lambda _self: Daemon())
        controller = Controller(settings, store)
        app = create_app(controller, TOKEN)
        client = stack.enter_context(TestClient(app, raise_server_exceptions=False))
        made = Api(app, client, controller, folder)
        for name, scope in (("admin", "admin"), ("inference", "inference"), ("revoked", "admin")):
            key = controller.create_key(name, scope)
            made.keys[name] = key.key
            if name == "revoked":
                store.revoke_key(key.key_id)
        yield made
        controller.close()
        store.close()
