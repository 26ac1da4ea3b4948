#!/usr/bin/env python3
"""Adds up what gcov counted of formats/: a part of tests/coverage.sh.

  gcov --json-format --stdout ... | tests/coverage.py ROOT LIST AIM

Writes the lines that nothing ran into LIST; ends with 1 where less than AIM percent of all were run.
"""
import collections
import json
import pathlib
import sys


def main():
    root, listing, aim = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    counts = collections.defaultdict(collections.Counter)  # file -> line -> times
    for document in filter(str.strip, sys.stdin):
        for file in json.loads(document)["files"]:
            path = root / file["file"]
            if root / "formats" not in path.parents:
                continue
            for line in file["lines"]:
                counts[path.relative_to(root)][line["line_number"]] += line["count"]
    if not counts:
        print("coverage: gcov has counted nothing", file=sys.stderr)
        return 1
    with open(listing, "w") as out:
        for path in sorted(counts):
            text = (root / path).read_text().splitlines()
            for line in sorted(n for n, times in counts[path].items() if times == 0):
                print(f"{path}:{line}: {text[line - 1].strip()}", file=out)
    rows = sorted((sum(t > 0 for t in lines.values()) / len(lines), str(path), len(lines)) for path, lines in counts.items())
    for part, path, lines in rows:
        print(f"{100 * part:6.1f} %  {path}  ({lines} lines)")
    lines = sum(len(c) for c in counts.values())
    run = sum(t > 0 for c in counts.values() for t in c.values())
    print(f"formats/: {100 * run / lines:.2f} % of {lines} lines are run, {lines - run} are not")
    return 0 if 100 * run / lines >= aim else 1


if __name__ == "__main__":
    sys.exit(main())
