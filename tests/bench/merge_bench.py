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
import interleaved

SOURCES = {"a": ["--mesh", "tp=8"], "b": ["--mesh", "tp=8"], "c": ["--mesh", "dp_shard=4"], "d": ["--to", "hf"]}


def main():
    with interleaved.bench(__doc__) as bench:
        out = bench.path("out")
        sources = [bench.model(name, *options) for name, options in SOURCES.items()]
        files = [f for source in sources for f in interleaved.files_of(source)]
        merge = [bench.reshard, "merge", *sources, out, "--to", "hf", "-q"]
        floor = interleaved.cat(files, "/dev/null") + " && " + interleaved.cat(interleaved.files_of(sources[-1]), out)
        sides = {"floor": ["sh", "-c", floor], "merge": [*merge, "--average"],
                 "weights": [*merge, "--weights", "0.4,0.3,0.2,0.1"]}
        times, memory, _ = bench.rounds(sides, out, files)
        print(f"{interleaved.size_of(files) / 1e9:.2f} GB in {len(files)} files, {bench.args.rounds} rounds")
        interleaved.print_table(times, {"/ floor": interleaved.ratios(times, "floor"),
                                        "peak MiB": interleaved.mebibytes(memory)})


if __name__ == "__main__":
    main()
