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
import os

import interleaved

CONFIG = os.path.join(interleaved.ROOT, "tests/data/configs/llama-3.1-8b.json")


def main():
    with interleaved.bench(__doc__, rounds=5, config={"default": CONFIG}) as bench:
        reshard, out = bench.reshard, bench.path("out.h5")
        source = bench.model("source", "--mesh", "tp=8")
        large = bench.made("large", "synth", None, "--config", bench.args.config, "--mesh", "tp=8", "--headers-only")
        kept = bench.made("kept.h5", "convert", source, None, "--to", "hdf5", "--codec", "zstd:1")
        files = interleaved.files_of(source)
        convert = [reshard, "convert", source, out, "--to", "hdf5", "-q"]
        sides = {
            "cat": ["sh", "-c", interleaved.cat(files, out)],
            "none": convert,
            "zstd1-1": [*convert, "--codec", "zstd:1", "--threads", "1"],
            "zstd1-2": [*convert, "--codec", "zstd:1", "--threads", "2"],
            "back": [reshard, "convert", kept, out, "--to", "hf", "-q"],
            "view": [reshard, "convert", large, out, "--to", "hdf5-view", "--names", "hf", "-q"],
        }
        times, memory, made = bench.rounds(sides, out, files)
        print(f"{interleaved.size_of(files) / 1e9:.2f} GB, {len(files)} files, {bench.args.rounds} rounds")
        interleaved.print_table(times, {
            "/ cat": interleaved.ratios(times, "cat"),
            "two over one": interleaved.ratios(times, {"zstd1-2": "zstd1-1"}),
            "peak MiB": interleaved.mebibytes(memory),
            "made MB": {name: size / 1e6 for name, size in made.items()}})


if __name__ == "__main__":
    main()
