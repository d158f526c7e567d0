"""The program of a rank beyond the first (``ranks``): its imports, lightly, then its work."""

from __future__ import annotations

import sys

from daemon.torch_engine.trimmed_imports import trimmed_imports


def main(argv: list[str]) -> int:
    with trimmed_imports():
        from daemon.torch_engine.parallel import rank_loop
    return rank_loop.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
