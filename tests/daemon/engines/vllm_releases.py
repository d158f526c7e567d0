"""Facts of vLLM's releases, recorded from their published wheels (``vllm_releases.json.xz``).

A new release is added, or one read again, by::

    python -m tests.daemon.engines.vllm_releases 0.34.0 [...]

which downloads its wheel (some 250 MB) with pip; ``--unpacked FOLDER`` reads one that lies there. What iServe
would miss in it is printed, by ``daemon.engines.vllm.contract``, and the options that ``own_options`` has to be
given a place for.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from daemon.engines.vllm.contract import ReleaseFacts, breaches, read_release
from daemon.engines.vllm.own_options import OWN_OPTIONS, TAKEN_OPTIONS
from fingerprint.codec import from_json, to_json

RECORDED = Path(__file__).with_name("vllm_releases.json.xz")
_GLIBC = (39, 35, 34, 31, 28, 17)


def recorded() -> dict[str, ReleaseFacts]:
    """Return the facts by version, in the order of releases."""
    text = lzma.decompress(RECORDED.read_bytes())
    return from_json(text, dict[str, ReleaseFacts], what=RECORDED.name)


def keep(facts: Mapping[str, ReleaseFacts]) -> None:
    ordered = dict(sorted(facts.items(), key=lambda item: [int(part) for part in item[0].split(".")]))
    RECORDED.write_bytes(lzma.compress(to_json(ordered), preset=9))


def published(version: str) -> ReleaseFacts:
    """Return the facts of the wheel that the package index has.

    Raises:
        CalledProcessError: it cannot be downloaded.
    """
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in _GLIBC] + [
        "--platform=manylinux2014_x86_64"
    ]
    abis = ["--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*pip, *abis, *platforms, f"vllm=={version}"], check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        return read_release(Path(folder) / "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+")
    parser.add_argument(
        "--unpacked", type=Path, help="the folder that holds the package vllm, of a single version"
    )
    options = parser.parse_args()
    facts = recorded() if RECORDED.exists() else {}
    for version in options.versions:
        facts[version] = read_release(options.unpacked / "vllm") if options.unpacked else published(version)
        missing = [f"{breach.part}: {breach.what}" for breach in breaches(facts[version])]
        known = OWN_OPTIONS.keys() | TAKEN_OPTIONS
        new = sorted(set(facts[version].flags) - {f"--{name}" for name in known})
        print(json.dumps({"version": version, "missing": missing, "options in neither table": new}))
    keep(facts)


if __name__ == "__main__":
    main()
