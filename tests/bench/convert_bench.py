#!/usr/bin/env python3
"""Speed of the main job, as ratios of interleaved runs (A B C A B C ...), medians.

  cmake --preset release -DRESHARD_BENCH=ON && cmake --build --preset release
  tests/bench/convert_bench.py [--rounds 7] [--work DIRECTORY] [--peer PYTHON] [--model llama3-1b] [--pause SECONDS]

Makes a TP=8 checkpoint with `reshard synth` in DIRECTORY (default: a temporary one beside the current directory's file
system; it needs about three times the model's size), reads it once so that the page cache holds it, then times:
  cat      cat of the source files into one new file
  floor    two threads, pread and pwrite of 1 MiB blocks (copy_floor)
  to-hf    reshard convert --to hf, CRC check and digests on
  to-tp2   reshard convert --to dcp --mesh tp=2
  verify   reshard verify of the source
  peer     tests/bench/peer_convert.py with --peer's Python (PyTorch), once a round if asked for
Every output is removed before the next run. Figures go to docs/benchmarks.md with this command.
"""
import argparse
import glob
import os
import shutil
import statistics
import subprocess
import tempfile

import interleaved

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work")
    parser.add_argument("--peer")
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--pause", type=float, default=0, help="seconds of rest before each run")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    args = parser.parse_args()
    work = args.work or tempfile.mkdtemp(prefix="reshard-bench-")
    os.makedirs(work, exist_ok=True)
    reshard, floor = os.path.join(args.build, "reshard"), os.path.join(args.build, "tests/bench/copy_floor")
    source, out = os.path.join(work, "source"), os.path.join(work, "out")
    if not os.path.isdir(source):
        subprocess.run([reshard, "synth", source, "--model", args.model, "--mesh", "tp=8", "-q"], check=True)
    files = sorted(glob.glob(os.path.join(source, "*.distcp")))
    size = sum(os.path.getsize(f) for f in files)
    quoted = " ".join(f"'{f}'" for f in files)
    sides = {
        "cat": ["sh", "-c", f"cat {quoted} > '{out}'"],
        "floor": [floor, out, "2", *files],
        "to-hf": [reshard, "convert", source, out, "--to", "hf", "-q"],
        "to-tp2": [reshard, "convert", source, out, "--to", "dcp", "--mesh", "tp=2", "-q"],
        "verify": [reshard, "verify", source, "-q"],
    }
    if args.peer:
        sides["peer"] = [args.peer, os.path.join(ROOT, "tests/bench/peer_convert.py"), source, out]

    sides = {name: (files, command) for name, command in sides.items()}
    times, memory, _ = interleaved.rounds(args.rounds, sides, out, work, args.pause)
    cat = statistics.median(times["cat"])
    base = statistics.median(times["floor"])
    print(f"{size / 1e9:.2f} GB, {len(files)} files, {args.rounds} rounds")
    print(f"{'':8} {'median s':>9} {'min':>6} {'max':>6} {'GB/s':>6} {'/ cat':>6} {'/ floor':>8} {'peak MiB':>9}")
    for name, values in times.items():
        m = statistics.median(values)
        print(f"{name:8} {m:9.2f} {min(values):6.2f} {max(values):6.2f} {size / 1e9 / m:6.2f} {m / cat:6.2f} "
              f"{m / base:8.2f} {memory[name] / 2**20:9.1f}")
    if not args.work:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
