#!/usr/bin/env python3
"""Speed of the HDF5 formats, as interleaved runs, medians.

  cmake --preset release && cmake --build --preset release
  tests/bench/hdf5_bench.py [--rounds 5] [--work DIRECTORY] [--model llama3-1b] [--config CONFIG]

Makes a TP=8 checkpoint with `reshard synth`, reads it once so that the page cache holds it, then times:
  cat      cat of the source files into one new file
  none     reshard convert --to hdf5
  zstd1-1  the same with --codec zstd:1 on one thread
  zstd1-2  and on two
  back     the archive of zstd:1 back to Hugging Face
  view     reshard convert --to hdf5-view of a checkpoint as --config describes it, headers only
Figures go to docs/benchmarks.md with this command.
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work")
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--config", default=os.path.join(ROOT, "tests/data/configs/llama-3.1-8b.json"))
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    args = parser.parse_args()
    work = args.work or tempfile.mkdtemp(prefix="reshard-bench-")
    os.makedirs(work, exist_ok=True)
    reshard = os.path.join(args.build, "reshard")
    source, large, out, kept = (os.path.join(work, name) for name in ("source", "large", "out.h5", "kept.h5"))
    if not os.path.isdir(source):
        subprocess.run([reshard, "synth", source, "--model", args.model, "--mesh", "tp=8", "-q"], check=True)
    if not os.path.isdir(large):
        subprocess.run([reshard, "synth", large, "--config", args.config, "--mesh", "tp=8", "--headers-only", "-q"],
                       check=True)
    convert = [reshard, "convert", source, out, "--to", "hdf5", "-q"]
    if not os.path.exists(kept):
        subprocess.run([reshard, "convert", source, kept, "--to", "hdf5", "--codec", "zstd:1", "-q"], check=True)
    files = sorted(glob.glob(os.path.join(source, "*.distcp")))
    size = sum(os.path.getsize(f) for f in files)
    quoted = " ".join(f"'{f}'" for f in files)
    sides = {
        "cat": ["sh", "-c", f"cat {quoted} > '{out}'"],
        "none": convert,
        "zstd1-1": [*convert, "--codec", "zstd:1", "--threads", "1"],
        "zstd1-2": [*convert, "--codec", "zstd:1", "--threads", "2"],
        "back": [reshard, "convert", kept, out, "--to", "hf", "-q"],
        "view": [reshard, "convert", large, out, "--to", "hdf5-view", "--names", "hf", "-q"],
    }
    sides = {name: (files, command) for name, command in sides.items()}
    times, memory, made = interleaved.rounds(args.rounds, sides, out, work)
    cat = statistics.median(times["cat"])
    print(f"{size / 1e9:.2f} GB, {len(files)} files, {args.rounds} rounds")
    print(f"{'':8} {'median s':>9} {'min':>6} {'max':>6} {'/ cat':>6} {'peak MiB':>9} {'made MB':>10}")
    for name, values in times.items():
        m = statistics.median(values)
        print(f"{name:8} {m:9.2f} {min(values):6.2f} {max(values):6.2f} {m / cat:6.2f} {memory[name] / 2**20:9.1f} "
              f"{made[name] / 1e6:10.2f}")
    print(f"two threads over one: {statistics.median(times['zstd1-1']) / statistics.median(times['zstd1-2']):.2f}")
    if not args.work:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
