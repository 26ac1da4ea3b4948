#!/usr/bin/env python3
"""Speed of the main job on several MPI ranks of one machine, as ratios of interleaved runs (A B C A B C ...), medians.

  tests/bench/ranks_bench.py [--rounds 7] [--ranks 2] [--work DIRECTORY] [--model llama3-1b] [--pause SECONDS]

Makes a TP=8 checkpoint with `reshard synth` in DIRECTORY (it needs about three times the model's size), then times
`reshard convert --to hf`:
  one       one process, its threads as always
  direct    mpirun -n RANKS, --strategy direct
  exchange  mpirun -n RANKS, --strategy exchange
  start     mpirun -n RANKS of a job that does nothing: what the launcher and MPI take to start and to end
A run with ranks includes its start. The ratios are given with it and less it.
"""
import argparse
import glob
import os
import statistics
import subprocess
import tempfile

import interleaved

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work")
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--pause", type=float, default=0, help="seconds of rest before each run")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    args = parser.parse_args()
    work = args.work or tempfile.mkdtemp(prefix="reshard-bench-")
    os.makedirs(work, exist_ok=True)
    reshard = os.path.join(args.build, "reshard")
    source, out = os.path.join(work, "source"), os.path.join(work, "out")
    if not os.path.isdir(source):
        subprocess.run([reshard, "synth", source, "--model", args.model, "--mesh", "tp=8", "-q"], check=True)
    files = sorted(glob.glob(os.path.join(source, "*.distcp")))
    mpirun = ["mpirun", "--oversubscribe", "-n", str(args.ranks)]
    if os.geteuid() == 0:
        mpirun.insert(1, "--allow-run-as-root")
    convert = [reshard, "convert", source, out, "--to", "hf", "-q"]
    sides = {
        "one": convert,
        "direct": [*mpirun, *convert, "--strategy", "direct"],
        "exchange": [*mpirun, *convert, "--strategy", "exchange"],
        "start": [*mpirun, *convert, "--dry-run"],
    }
    times, _, _ = interleaved.rounds(args.rounds, {n: (files, c) for n, c in sides.items()}, out, work, args.pause)
    median = {name: statistics.median(t) for name, t in times.items()}
    print(f"{sum(os.path.getsize(f) for f in files) / 1e9:.2f} GB, {args.ranks} ranks, {args.rounds} rounds")
    for name, t in times.items():
        line = f"{name:9} {median[name]:6.2f} s  ({min(t):.2f} .. {max(t):.2f})"
        if name in ("direct", "exchange"):
            line += f"   {median[name] / median['one']:.2f} x one"
            line += f"   {(median[name] - median['start']) / median['one']:.2f} x less the start"
        print(line)


if __name__ == "__main__":
    main()
