"""``python -m tests.iserve.gateway.variant_gateway``: the gateway over stand-ins for the folders of variants.

The folder of a content has its hash as name; while there is a file HASH.broken next to it, it fails its check.
Those of deltas have a manifest.
Nothing is loaded before it is asked for, so that tests say what is loaded when, unless ``--preload`` is given.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from fingerprint.errors import CheckpointError
from iserve.gateway import __main__ as gateway
from iserve.gateway import variant_residency
from tests.daemon.engines.vllm_stand_in.deltas import MANIFEST_FILE


class Folders:
    def __init__(self, root: Path) -> None:
        self.root = root

    def loadable(self, content_hash: str) -> Path:
        folder = self.root / content_hash
        if folder.with_suffix(".broken").exists():
            raise CheckpointError(f"{folder}: a tensor was changed")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def checked(self, content_hash: str, base: Path) -> Path:
        """Return the folder, and note the check; a base OTHER is that of no delta, and HUGE is hashed for ever.

        HELD is hashed until there is a file HASH.hashed next to the folder.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "checked").open("a") as noted:
            noted.write(f"{content_hash} {base}\n")
        if base.name == "HUGE":
            threading.Event().wait()
        while base.name == "HELD" and not (self.root / f"{content_hash}.hashed").exists():
            time.sleep(0.01)
        if base.name == "OTHER":
            raise CheckpointError(f"the delta was made of another base than {base}: tensor 'x.weight' differs")
        folder = self.loadable(content_hash)
        (folder / MANIFEST_FILE).touch()
        return folder


if __name__ == "__main__":
    gateway._StoredVariants = Folders
    if "--preload" in sys.argv:
        sys.argv.remove("--preload")
    else:
        variant_residency.chosen_preloads = lambda *_: []
    sys.exit(gateway.main())
