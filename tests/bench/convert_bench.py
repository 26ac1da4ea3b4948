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
import os

import interleaved


def main():
    options = {"peer": {"help": "a Python with PyTorch"}, "pause": interleaved.PAUSE}
    with interleaved.bench(__doc__, **options) as bench:
        floor, peer = os.path.join(bench.args.build, "tests/bench/copy_floor"), "tests/bench/peer_convert.py"
        source, out = bench.model("source", "--mesh", "tp=8"), bench.path("out")
        files = interleaved.files_of(source)
        convert = [bench.reshard, "convert", source, out, "-q"]
        sides = {
            "cat": ["sh", "-c", interleaved.cat(files, out)],
            "floor": [floor, out, "2", *files],
            "to-hf": [*convert, "--to", "hf"],
            "to-tp2": [*convert, "--to", "dcp", "--mesh", "tp=2"],
            "verify": [bench.reshard, "verify", source, "-q"],
        }
        if bench.args.peer:
            sides["peer"] = [bench.args.peer, os.path.join(interleaved.ROOT, peer), source, out]
        times, memory, _ = bench.rounds(sides, out, files)
        size = interleaved.size_of(files) / 1e9
        print(f"{size:.2f} GB, {len(files)} files, {bench.args.rounds} rounds")
        interleaved.print_table(times, {
            "GB/s": {name: size / m for name, m in interleaved.medians(times).items()},
            "/ cat": interleaved.ratios(times, "cat"),
            "/ floor": interleaved.ratios(times, "floor"),
            "peak MiB": interleaved.mebibytes(memory)})


if __name__ == "__main__":
    main()
