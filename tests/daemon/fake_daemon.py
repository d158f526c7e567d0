"""The real daemon with quick settings: ``fake_daemon.py HOME SETTINGS_JSON``.

The stdlib worker is in the embedded engine's place, unless the settings say ``real_engines``.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from daemon.backoff import RestartPolicy
from daemon.devices import Device
from daemon.engines.base import Command
from daemon.engines.registry import get_engine
from daemon.engines.torch import TorchEngine
from daemon.server import serve
from daemon.settings import DaemonSettings
from daemon.worker_spec import WorkerSpec
from fingerprint.errors import IserveError


class FakeEngine(TorchEngine):
    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        worker = Path(__file__).with_name("fake_worker.py")
        return Command(argv=(sys.executable, "-S", str(worker), str(folder / "spec.json")))


def main() -> int:
    values = json.loads(sys.argv[2])
    restart = RestartPolicy(**values.pop("restart"))
    real_engines = values.pop("real_engines", False)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    settings = DaemonSettings(home=Path(sys.argv[1]), restart=restart, **values)
    fake = FakeEngine()
    try:
        asyncio.run(
            serve(settings, lambda name: fake if name == "torch" and not real_engines else get_engine(name))
        )
    except IserveError as error:
        print(f"daemon: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
