"""Results of quality next to a checkpoint: one small file in its folder, each result with its hashes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, ConfigError, NotFoundError
from fingerprint.output_file import output_file, write_output
from iserve.quality.document import QualityDocument
from iserve.quality.identity import identity_of

__all__ = ["KEPT_FILE", "keep_next_to", "kept_next_to"]

KEPT_FILE = "iserve-quality.json"
_MOST = 32  # results of a checkpoint; the oldest are dropped
_MOST_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    results: tuple[QualityDocument, ...]  # the newest last


def keep_next_to(folder: Path, result: QualityDocument) -> Path:
    """Add ``result`` to the file in ``folder``, in place of one of the same contents; return the file.

    Raises:
        ConfigError, NotFoundError: the folder cannot be written to, or has another file of that name.
    """
    file = output_file(folder / KEPT_FILE)
    identity = identity_of(result)
    kept = [one for one in kept_next_to(folder) if identity_of(one) != identity]
    write_output(file, to_json(_Kept(results=(*kept, result)[-_MOST:]), indent=2).decode() + "\n")
    return file


def kept_next_to(folder: Path) -> tuple[QualityDocument, ...]:
    """Return the results in ``folder``, the newest last; of any contents, which their hashes say.

    Raises:
        ConfigError: the file there is no file of results.
        NotFoundError: it cannot be read.
    """
    file = folder / KEPT_FILE
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise NotFoundError(f"{file} cannot be read: {error.strerror or error}") from error
    try:
        if len(text) > _MOST_BYTES:
            raise BadInputError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return from_json(text, _Kept, what=str(file)).results
    except BadInputError as error:
        raise ConfigError(f"{file} has no results of `iserve quality`: {error}; move it away") from error
