"""Facts and registries of vLLM's releases, recorded from their published wheels.

They are ``vllm_releases.json.xz`` (the contract) and ``vllm_registries.json.xz`` (the architectures).

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
from email import message_from_string
from email.message import Message
from functools import cache
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement

from daemon.engines.vllm.contract import ReleaseFacts, breaches, read_release
from daemon.engines.vllm.model_registry import Registry, read_registry
from daemon.engines.vllm.own_options import OWN_OPTIONS, TAKEN_OPTIONS
from fingerprint.codec import from_json, to_json

T = TypeVar("T")

RECORDED = Path(__file__).with_name("vllm_releases.json.xz")
REGISTRIES = Path(__file__).with_name("vllm_registries.json.xz")
_GLIBC = (39, 35, 34, 31, 28, 17)


def recorded() -> dict[str, ReleaseFacts]:
    """Return the facts by version, in the order of releases."""
    return _kept(RECORDED, dict[str, ReleaseFacts])


@cache
def recorded_registries() -> dict[str, Registry]:
    """Return the registries by version, in the order of releases."""
    return _kept(REGISTRIES, dict[str, Registry])


def _kept(file: Path, kind: type[T]) -> T:
    return from_json(lzma.decompress(file.read_bytes()), kind, what=file.name)


def keep(file: Path, by_version: Mapping[str, object]) -> None:
    ordered = dict(sorted(by_version.items(), key=lambda item: [int(part) for part in item[0].split(".")]))
    file.write_bytes(lzma.compress(to_json(ordered), preset=9))


def download(requirement: str, folder: Path) -> None:
    """Unpack the Python files and the metadata of the wheel that the package index has into ``folder``.

    Raises:
        CalledProcessError: it cannot be downloaded.
    """
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in _GLIBC] + [
        "--platform=manylinux2014_x86_64"
    ]
    abis = ["--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none"]
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
        subprocess.run([*pip, *abis, *platforms, requirement], check=True, capture_output=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".py", ".dist-info/METADATA"))]
            archive.extractall(folder, wanted)


def version_of(folder: Path, distribution: str) -> str:
    """Return the version of an unpacked wheel."""
    return _metadata(folder, distribution)["Version"]


def requirement_of(folder: Path, distribution: str, needed: str) -> str:
    """Return which releases of ``needed`` an unpacked wheel takes, as pip is asked for them."""
    stated = (Requirement(text) for text in _metadata(folder, distribution).get_all("Requires-Dist", []))
    return next(f"{one.name}{one.specifier}" for one in stated if one.name == needed and not one.marker)


def _metadata(folder: Path, distribution: str) -> Message:
    (info,) = folder.glob(f"{distribution}-*.dist-info")
    return message_from_string((info / "METADATA").read_text(encoding="utf-8"))


def published(version: str) -> tuple[ReleaseFacts, Registry]:
    """Return the facts and the registry of the wheel that the package index has.

    Raises:
        CalledProcessError: it cannot be downloaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        download(f"vllm=={version}", Path(folder))
        return _read(Path(folder), version)


def _read(folder: Path, version: str) -> tuple[ReleaseFacts, Registry]:
    return read_release(folder / "vllm"), read_registry(folder / "vllm", version)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+")
    parser.add_argument(
        "--unpacked", type=Path, help="the folder that holds the package vllm, of a single version"
    )
    options = parser.parse_args()
    facts = recorded() if RECORDED.exists() else {}
    registries = recorded_registries() if REGISTRIES.exists() else {}
    for version in options.versions:
        found = _read(options.unpacked, version) if options.unpacked else published(version)
        facts[version], registries[version] = found
        missing = [f"{breach.part}: {breach.what}" for breach in breaches(facts[version])]
        known = OWN_OPTIONS.keys() | TAKEN_OPTIONS
        new = sorted(set(facts[version].flags) - {f"--{name}" for name in known})
        print(json.dumps({"version": version, "missing": missing, "options in neither table": new}))
    keep(RECORDED, facts)
    keep(REGISTRIES, registries)


if __name__ == "__main__":
    main()
