"""Files of a folder that was handed over: links may not lead out of it."""

from __future__ import annotations

from pathlib import Path

from fingerprint.errors import CheckpointError

__all__ = ["file_within"]


def file_within(folder: Path, name: str, kind: str) -> Path:
    """Return the file ``name`` of ``folder``, behind its links; it is there.

    Links may lead within the folder, and to the blobs of a hub's cache.

    Args:
        kind: what the folder is of, for messages, such as ``adapter``.

    Raises:
        CheckpointError: it lies outside, or its links lead nowhere.
    """
    try:
        home, file = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder / name} leads nowhere; fetch it again") from error
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not (file.is_relative_to(home) or file.is_relative_to(blobs)):
        raise CheckpointError(
            f"{folder / name} is a link to {file}, outside the {kind}'s folder; copy the file there"
        )
    return file
