#!/usr/bin/env python3
"""Speed of reading ColossalAI's torch.save files and of casts, as ratios of interleaved runs (A B C A B C ...), medians.

  tests/bench/formats_bench.py [--rounds 7] [--work DIRECTORY] [--model llama3-1b] [--layers N] [--pause SECONDS]

Makes a ColossalAI checkpoint of torch.save files (two pipeline stages) and a Hugging Face model in float32, reads both
once so that the page cache holds them, then times:
  cat           cat of ColossalAI's files into one new file
  bin-to-hf     reshard convert of them --to hf, CRC check and digests on
  f32-to-f32    reshard convert of the float32 model --to hf
  f32-to-DTYPE  the same with --dtype; its speed is counted in bytes read
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
CASTS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work")
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--layers", default="8")
    parser.add_argument("--pause", type=float, default=0, help="seconds of rest before each run")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    args = parser.parse_args()
    work = args.work or tempfile.mkdtemp(prefix="reshard-bench-")
    os.makedirs(work, exist_ok=True)
    reshard = os.path.join(args.build, "reshard")
    model, colossal, wide, out = (os.path.join(work, n) for n in ("model", "colossalai", "float32", "out"))

    def quietly(*command):
        subprocess.run([reshard, *command, "-q"], check=True)

    if not os.path.isdir(colossal):
        quietly("synth", model, "--model", args.model, "--layers", args.layers, "--to", "hf")
        quietly("convert", model, colossal, "--to", "colossalai", "--shard-format", "bin", "--mesh", "pp=2")
        quietly("convert", model, wide, "--to", "hf", "--dtype", "float32")
    sources = {"bin": sorted(glob.glob(os.path.join(colossal, "*.bin"))),
               "f32": sorted(glob.glob(os.path.join(wide, "*.safetensors")))}
    sizes = {k: sum(map(os.path.getsize, v)) for k, v in sources.items()}
    sides = {"cat": ("bin", ["sh", "-c", "cat " + " ".join(f"'{f}'" for f in sources["bin"]) + f" > '{out}'"]),
             "bin-to-hf": ("bin", [reshard, "convert", colossal, out, "--to", "hf", "-q"]),
             "f32-to-f32": ("f32", [reshard, "convert", wide, out, "--to", "hf", "-q"])}
    for dtype in CASTS:
        sides["f32-to-" + dtype] = ("f32", [reshard, "convert", wide, out, "--to", "hf", "--dtype", dtype, "-q"])

    timed = {name: (sources[source], command) for name, (source, command) in sides.items()}
    times, memory, _ = interleaved.rounds(args.rounds, timed, out, work, args.pause)
    base = {"bin": statistics.median(times["cat"]), "f32": statistics.median(times["f32-to-f32"])}
    print(f"ColossalAI {sizes['bin'] / 1e9:.2f} GB, float32 model {sizes['f32'] / 1e9:.2f} GB, {args.rounds} rounds")
    print(f"{'':18} {'median s':>9} {'min':>6} {'max':>6} {'GB/s':>6} {'/ base':>7} {'peak MiB':>9}")
    for name, values in times.items():
        m, source = statistics.median(values), sides[name][0]
        print(f"{name:18} {m:9.2f} {min(values):6.2f} {max(values):6.2f} {sizes[source] / 1e9 / m:6.2f} "
              f"{m / base[source]:7.2f} {memory[name] / 2**20:9.1f}")
    if not args.work:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
