#!/usr/bin/env python3
"""Speed of reading trainers' checkpoints beside DCP's, as ratios of interleaved runs (A B C A B C ...), medians.

  tests/bench/readers_bench.py --venv PYTHON [--rounds 7] [--work DIRECTORY] [--model llama3-1b] [--layers N] [--zero]

Writes one model as PyTorch DCP of 8 FSDP ranks, as torch_checkpointing, as per-rank files, as Megatron core's torch_dist
(these by reshard) and as verl's torch.save'd DTensors (by torch), and times `reshard convert --to hf` of each, CRC checks
and digests on. With --zero the model is a small one with AdamW's state instead: DeepSpeed ZeRO 3 of 4 ranks (by
DeepSpeed), the same state as DCP, and DeepSpeed's own zero_to_fp32.py. Every output is removed before the next run.
Figures go to docs/benchmarks.md with this command.
"""
import glob
import json
import os
import pathlib
import subprocess

import interleaved

MAKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "trainers_files.py")
# 250 million parameters: 3.0 GB of float32 with both moments.
SMALL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024,
         "intermediate_size": 2816, "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}


def all_files(directory):
    return sorted(f for f in glob.glob(os.path.join(directory, "**"), recursive=True) if os.path.isfile(f))


def made_by_library(bench, name, *words):
    path = bench.path(name)
    if not os.path.exists(path):
        what, source, ranks = words
        subprocess.run([bench.args.venv, "-W", "ignore", MAKER, what, source, path, ranks], check=True,
                       stdout=subprocess.DEVNULL)
    return path


def models(bench):
    model = bench.model("hf", "--layers", bench.args.layers, "--to", "hf")

    def converted(name, mesh):
        return bench.made(name, "convert", model, None, "--to", name, "--mesh", mesh)

    sources = {"dcp": converted("dcp", "dp_shard=8"),
               "torch_checkpointing": converted("torch_checkpointing", "dp_shard=8"),
               "ranks": converted("ranks", "tp=8"),
               "megatron": converted("megatron", "tp=8"),
               "verl": made_by_library(bench, "verl", "verl", model, "8")}
    config = os.path.join(model, "config.json")
    return {name: [path, "--config", config] for name, path in sources.items()}


def zero(bench):
    config = bench.path("config.json")
    pathlib.Path(config).write_text(json.dumps(SMALL))
    zero3 = made_by_library(bench, "zero3", "zero3", config, "4")
    dcp = bench.made("zero-dcp", "convert", zero3, None, "--to", "dcp", "--mesh", "dp_shard=4", "--weights", "master")
    return {"dcp float32": [dcp, "--config", config], "zero3 masters": [zero3, "--weights", "master"],
            "zero3 bfloat16": [zero3]}


def main():
    options = {"layers": {"default": "16"}, "pause": interleaved.PAUSE, "venv": {"required": True},
               "zero": {"action": "store_true"}}
    with interleaved.bench(__doc__, **options) as bench:
        out = bench.path("out")
        sources = zero(bench) if bench.args.zero else models(bench)
        sides = {name: [bench.reshard, "convert", words[0], out, "--to", "hf", "-q", *words[1:]]
                 for name, words in sources.items()}
        files = {name: all_files(words[0]) for name, words in sources.items()}
        if bench.args.zero:
            path = sources["zero3 masters"][0]
            sides["zero_to_fp32.py"] = [bench.args.venv, "-W", "ignore", os.path.join(path, "zero_to_fp32.py"), path, out,
                                        "--safe_serialization"]
            files["zero_to_fp32.py"] = files["zero3 masters"]
        times, memory, _ = bench.rounds(sides, out, files)
        interleaved.print_table(times, {
            "GB on disk": {name: interleaved.size_of(of) / 1e9 for name, of in files.items()},
            "/ dcp": interleaved.ratios(times, next(iter(sides))),
            "peak MiB": interleaved.mebibytes(memory)})


if __name__ == "__main__":
    main()
