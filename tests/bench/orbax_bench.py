#!/usr/bin/env python3
"""Speed and memory of MaxText's checkpoints to Hugging Face, as ratios of interleaved runs (A B C A B C ...), medians.

  tests/bench/orbax_bench.py [--jax PYTHON] [--rounds 3] [--work DIRECTORY] [--model llama3-1b] [--layers N] [--pause SECONDS]

Makes a scanned model of raw chunks and, by PYTHON's orbax-checkpoint, the same in chunks of zstd, reads both once so that
the page cache holds them, then times:
  cat       cat of the raw model's files into one new file
  raw, zstd reshard convert of each --to hf, digests on
  to-orbax  reshard convert of the Hugging Face model back, --to orbax
  peer      orbax-checkpoint, numpy and safetensors doing what `zstd` does (peer_orbax.py)
Without --jax, chunks of zstd are reshard's own and there is no peer. Every output is removed before the next run.
"""
import glob
import os
import subprocess

import interleaved

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_orbax.py")


def files_of(item):
    """The files of chunks and nodes."""
    return sorted(glob.glob(os.path.join(item, "ocdbt.process_*", "d", "*")) + glob.glob(os.path.join(item, "d", "*")))


def main():
    options = {"jax": {"default": ""}, "layers": {"default": "16"}, "pause": interleaved.PAUSE}
    with interleaved.bench(__doc__, rounds=3, **options) as bench:
        out, jax = bench.path("out"), bench.args.jax
        raw = bench.model("raw", "--layers", bench.args.layers, "--to", "orbax", "--names", "maxtext")
        hf = bench.made("hf", "convert", raw, None, "--to", "hf", "--source-names", "maxtext")
        zstd = bench.path("zstd")
        if not jax:
            bench.made("zstd", "convert", raw, None, "--to", "orbax", "--codec", "zstd:3", "--family", "none")
        elif not os.path.exists(zstd):
            subprocess.run([jax, PEER, "save", raw, zstd], check=True)
            subprocess.run(["cp", f"{raw}/config.json", zstd], check=True)
        to_hf = ["--to", "hf", "--source-names", "maxtext", "-q"]
        sides = {"cat": ["sh", "-c", interleaved.cat(files_of(raw), out)],
                 "raw": [bench.reshard, "convert", raw, out, *to_hf],
                 "zstd": [bench.reshard, "convert", zstd, out, *to_hf],
                 "to-orbax": [bench.reshard, "convert", hf, out, "--to", "orbax", "--names", "maxtext", "-q"]}
        if jax:
            sides["peer"] = [jax, PEER, "convert", zstd, out]
        files = {name: files_of(zstd if name in ("zstd", "peer") else raw) for name in sides}
        times, memory, _ = bench.rounds(sides, out, files)
        print(f"raw {interleaved.size_of(files['raw']) / 1e9:.2f} GB, zstd {interleaved.size_of(files['zstd']) / 1e9:.2f} GB, "
              f"{bench.args.rounds} rounds")
        interleaved.print_table(times, {"/ cat": interleaved.ratios(times, "cat"), "peak MiB": interleaved.mebibytes(memory)})


if __name__ == "__main__":
    main()
