#!/usr/bin/env python3
"""Speed of merging four checkpoints, as ratios of interleaved runs (A B A B ...), medians.

  cmake --preset release && cmake --build --preset release
  tests/bench/merge_bench.py [--rounds 7] [--work DIRECTORY]  [--model llama3-1b]

Makes four checkpoints of one model of 3.0 GB with `reshard synth` in DIRECTORY (two TP=8 DCP, one FSDP, one Hugging Face; it
needs five times the model's size), reads them once so that the page cache holds them, then times:
  floor    cat of all their files to /dev/null, then cat of the Hugging Face files into one new file
  merge    reshard merge --average --to hf
  weights  reshard merge --weights 0.4,0.3,0.2,0.1 --to hf
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
SOURCES = {"a": ["--mesh", "tp=8"], "b": ["--mesh", "tp=8"], "c": ["--mesh", "dp_shard=4"], "d": ["--to", "hf"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work")
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    args = parser.parse_args()
    work = args.work or tempfile.mkdtemp(prefix="reshard-bench-")
    os.makedirs(work, exist_ok=True)
    reshard, out = os.path.join(args.build, "reshard"), os.path.join(work, "out")
    sources = [os.path.join(work, name) for name in SOURCES]
    for path, options in zip(sources, SOURCES.values()):
        if not os.path.isdir(path):
            subprocess.run([reshard, "synth", path, "--model", args.model, "-q", *options], check=True)
    files = [f for path in sources for f in sorted(glob.glob(os.path.join(path, "*.distcp")) +
                                                   glob.glob(os.path.join(path, "*.safetensors")))]
    quoted, last = (" ".join(f"'{f}'" for f in some) for some in (files, [f for f in files if f.startswith(sources[-1])]))
    merge = [reshard, "merge", *sources, out, "--to", "hf", "-q"]
    sides = {"floor": ["sh", "-c", f"cat {quoted} > /dev/null && cat {last} > '{out}'"],
             "merge": [*merge, "--average"], "weights": [*merge, "--weights", "0.4,0.3,0.2,0.1"]}
    times, memory, _ = interleaved.rounds(args.rounds, {k: (files, v) for k, v in sides.items()}, out, work)
    size, base = sum(map(os.path.getsize, files)), statistics.median(times["floor"])
    print(f"{size / 1e9:.2f} GB in {len(files)} files, {args.rounds} rounds")
    for name, values in times.items():
        m = statistics.median(values)
        print(f"{name:8} {m:7.2f} s  {min(values):7.2f} to {max(values):7.2f}  {m / base:6.2f} x floor  "
              f"peak {memory[name] / 2**20:.1f} MiB")
    if not args.work:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
