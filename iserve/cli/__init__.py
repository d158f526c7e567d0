"""The command line: parse, call one function, print."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of ``iserve``: expected errors are one line and exit code 1; bugs keep their traceback.

    Usage errors (2), Ctrl-C (130) and a reader that closed the pipe (1, no word) are typer's.
    """
    from fingerprint.errors import IserveError
    from iserve.cli.app import make_app
    from iserve.cli.sanitized_output import harmless_output

    harmless_output()
    try:
        make_app(*sys.argv[1:2])()
    except IserveError as error:
        _fail(str(error))
    except OSError as error:  # of the machine, not of the code: a full disk, a folder that may not be written
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror or error}{where}")


def _fail(message: str) -> None:
    print(f"iserve: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
