"""Draw lines of the product for a reading trial: which file is this line from?

    python docs/reading_trial.py SEED [--count 20] [--answers]

Prints lines drawn evenly over all files of the product, a file at most once, without its path; ``--answers``
prints the paths. The reader sees the tree (``git ls-files``) and nothing else. A line is one of code with at
least 40 characters; imports, decorators, docstrings and comments are left out.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from pathlib import Path

PACKAGES = ("iserve", "fingerprint", "planner", "placement", "daemon", "traces")
LEAST_CHARACTERS = 40


def lines_of_code(text: str) -> list[str]:
    """Return the lines of code that are long enough to say something."""
    tree = ast.parse(text)
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return [
        line
        for number, line in lines
        if number not in left_out
        and len(line) >= LEAST_CHARACTERS
        and not line.startswith(("#", "@", "__all__", '"'))
    ]


def draw(seed: int, count: int) -> list[tuple[str, str]]:
    """Return ``count`` pairs of path and line."""
    listed = subprocess.run(["git", "ls-files", *PACKAGES], capture_output=True, text=True, check=True).stdout
    chance = random.Random(seed)
    found = {path: lines_of_code(Path(path).read_text()) for path in listed.splitlines() if path.endswith(".py")}
    paths = chance.sample(sorted(path for path, lines in found.items() if lines), count)
    return [(path, chance.choice(found[path])) for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--answers", action="store_true")
    given = parser.parse_args()
    for number, (path, line) in enumerate(draw(given.seed, given.count), 1):
        print(f"{number:2}. {path if given.answers else line}")


if __name__ == "__main__":
    main()
