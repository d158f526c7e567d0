"""The command line: parse, call one function, print."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of ``iserve``: expected errors are one line and exit code 1; bugs keep their traceback."""
    from fingerprint.errors import IserveError
    from iserve.cli.app import app

    try:
        app()
    except IserveError as error:
        print(f"iserve: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("iserve: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `iserve plan ... | head`
        sys.stderr.close()
        sys.exit(0)
