#!/usr/bin/env python3
"""Conversions whose source or target lies badly for the other side, as ratios to a `cat` of the source made durable.

  cmake --preset release && cmake --build --preset release --target reshard
  tests/bench/cliffs_bench.py [--rounds 5] [--work DIRECTORY] [--python PYTHON] [--only WORD]

Checkpoints are made by `reshard synth` in DIRECTORY, 3 GB each, one at a time unless --work keeps them; those of column-major
items with --python's PyTorch. Rows are in turn; each output is removed before the next run. The base of a row is
`cat SOURCE > out && sync out`. Figures go to docs/benchmarks.md with this command.
"""
import json
import os
import shutil
import subprocess

import interleaved

GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_layer": 40,
        "n_positions": 1024, "vocab_size": 50257, "torch_dtype": "bfloat16"}
COLUMNS = {"reshard_layout": 1, "name": "columns", "mesh": [{"axis": "dp_shard", "size": 512}], "files": "shards", "tensors": [
    {"names": ["*norm*"], "splits": [{"axes": ["dp_shard"], "dim": 0}]},
    {"names": ["*"], "splits": [{"axes": ["dp_shard"], "dim": 1}]}]}
COLUMN_MAJOR = """
import sys, torch, torch.distributed.checkpoint as dcp
torch.manual_seed(0)
dcp.save({f"t{i}": torch.randint(-30000, 30000, (8192, 4096), dtype=torch.int16).view(torch.bfloat16).t() for i in range(32)},
         checkpoint_id=sys.argv[1], no_dist=True)
"""
# Each source: how it is made (arguments of synth, or a torch script), and its rows: arguments of reshard.
SOURCES = {
    "gpt2-hf": (["--config", "gpt2.json", "--to", "hf"], {
        "megatron": "convert SRC OUT --to dcp --names megatron",
        "megatron, tp=4": "convert SRC OUT --to dcp --names megatron --mesh tp=4",
        "megatron, dp_shard=16": "convert SRC OUT --to dcp --names megatron --mesh dp_shard=16"}),
    "gpt2-megatron": (["--config", "gpt2.json", "--names", "megatron", "--mesh", "tp=4"], {"hf": "convert SRC OUT --to hf"}),
    "column-major": (COLUMN_MAJOR, {"hf": "convert SRC OUT --to hf --family none", "verify": "verify SRC",
                                    "dcp": "convert SRC OUT --to dcp"}),
    "hf": (["--model", "llama3-1b", "--to", "hf"], {
        "dcp, tp=8 x dp_shard=128": "convert SRC OUT --to dcp --names hf --mesh dp_shard=128,tp=8",
        "dcp, 512 column shards": "convert SRC OUT --to dcp --names hf --layout columns.json",
        "dcp, tp=8": "convert SRC OUT --to dcp --names hf --mesh tp=8"}),
    "dcp, dp_shard=128 x tp=8": (["--model", "llama3-1b", "--mesh", "dp_shard=128,tp=8"], {
        "hf": "convert SRC OUT --to hf", "dcp, tp=3": "convert SRC OUT --to dcp --mesh tp=3"}),
}


def main():
    options = {"python": {"help": "a Python with PyTorch"}, "only": {"help": "sources whose name has this", "default": ""}}
    with interleaved.bench(__doc__, rounds=5, **options) as bench:
        for name, text in (("gpt2.json", GPT2), ("columns.json", COLUMNS)):
            with open(bench.path(name), "w", encoding="utf-8") as f:
                json.dump(text, f)
        local = {name: bench.path(name) for name in ("gpt2.json", "columns.json")}
        for number, (source, (made_by, rows)) in enumerate(SOURCES.items()):
            if bench.args.only not in source or (isinstance(made_by, str) and not bench.args.python):
                continue
            name = f"source{number}"
            if isinstance(made_by, str):
                path = bench.path(name)
                if not os.path.exists(path):
                    subprocess.run([bench.args.python, "-W", "ignore", "-c", made_by, path], check=True)
            else:
                path = bench.made(name, "synth", None, *(local.get(w, w) for w in made_by))
            out, files = bench.path("out"), interleaved.files_of(path)
            base = f"cat of {source}, durable"
            sides = {base: ["sh", "-c", interleaved.cat(files, out) + f" && sync '{out}'"]}
            for row, words in rows.items():
                places = {"SRC": path, "OUT": out, **local}
                sides["  -> " + row] = [bench.reshard, *(places.get(w, w) for w in words.split()), "-q"]
            times, memory, _ = bench.rounds(sides, out, files)
            interleaved.print_table(times, {"/ cat": interleaved.ratios(times, base), "CPU s": interleaved.medians(bench.processor),
                                            "peak MiB": interleaved.mebibytes(memory)})
            if not bench.args.work:
                shutil.rmtree(path)


if __name__ == "__main__":
    main()
