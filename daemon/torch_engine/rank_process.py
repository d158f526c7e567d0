"""The program of a rank beyond the first (``ranks``): its imports, lightly, then its work."""

from __future__ import annotations

import sys

from daemon.torch_engine.light_imports import light_imports


def main(argv: list[str]) -> int:
    with light_imports():
        from daemon.torch_engine import ranks
    return ranks.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
