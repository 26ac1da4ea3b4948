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
import os

import interleaved


def main():
    options = {"ranks": {"type": int, "default": 2}, "pause": interleaved.PAUSE}
    with interleaved.bench(__doc__, **options) as bench:
        source, out = bench.model("source", "--mesh", "tp=8"), bench.path("out")
        files = interleaved.files_of(source)
        mpirun = ["mpirun", "--oversubscribe", "-n", str(bench.args.ranks)]
        if os.geteuid() == 0:
            mpirun.insert(1, "--allow-run-as-root")
        convert = [bench.reshard, "convert", source, out, "--to", "hf", "-q"]
        sides = {
            "one": convert,
            "direct": [*mpirun, *convert, "--strategy", "direct"],
            "exchange": [*mpirun, *convert, "--strategy", "exchange"],
            "start": [*mpirun, *convert, "--dry-run"],
        }
        times, _, _ = bench.rounds(sides, out, files)
        m = interleaved.medians(times)
        ranks = ("direct", "exchange")
        print(f"{interleaved.size_of(files) / 1e9:.2f} GB, {bench.args.ranks} ranks, {bench.args.rounds} rounds")
        interleaved.print_table(times, {
            "/ one": interleaved.ratios(times, dict.fromkeys(ranks, "one")),
            "less the start": {name: (m[name] - m["start"]) / m["one"] for name in ranks}})


if __name__ == "__main__":
    main()
