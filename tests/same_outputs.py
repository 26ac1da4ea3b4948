#!/usr/bin/env python3
"""same_outputs.py OLD NEW CHECKPOINT...: do two builds of reshard write the same bytes?

Converts each checkpoint with both programs to every format that either can write, and compares all files. A checkpoint
is a directory or file; a config.json next to it is given by --config. In JSON files that reshard writes, the version and
the paths of the run are left out. Prints each difference, then the count. Exits with 1 if outputs differ, or if one
program refuses what the other converts.
"""
import os
import re
import subprocess
import sys
import tempfile

TARGETS = [
    ("hf",), ("hf", "--family", "none"), ("hf", "--dtype", "bfloat16"), ("bin",), ("dcp",), ("dcp", "--mesh", "tp=2"),
    ("dcp", "--mesh", "dp_shard=2,tp=2", "--names", "torchtitan"), ("torch_checkpointing", "--mesh", "tp=2"),
    ("hdf5", "--codec", "zstd:1"), ("ranks", "--mesh", "tp=2"), ("megatron", "--mesh", "tp=2"),
    ("megatron-legacy", "--mesh", "tp=2"), ("deepspeed-universal",), ("colossalai",), ("vllm", "--mesh", "tp=2"),
]


def files(directory):
    out = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(root, name)
            data = open(path, "rb").read()
            if name.endswith("manifest.json"):
                data = re.sub(rb'"(version|source|config|path)": "[^"]*"', b"", data)
            out[os.path.relpath(path, directory)] = data
    return out


def convert(program, source, out, target):
    config = [os.path.join(d, "config.json") for d in (source, os.path.dirname(source))]
    config = next((["--config", c] for c in config if os.path.isfile(c)), [])
    line = [program, "convert", source, out, "-q", "--threads", "1", "--to", *target, *config]
    return subprocess.run(line, capture_output=True, timeout=300).returncode


def main():
    old, new, sources = sys.argv[1], sys.argv[2], sys.argv[3:]
    same = different = refused = 0
    for source in sources:
        for target in TARGETS:
            with tempfile.TemporaryDirectory() as at:
                outs = [os.path.join(at, which, "out") for which in "ab"]
                for out in outs:
                    os.mkdir(os.path.dirname(out))
                codes = [convert(p, source, o, target) for p, o in zip((old, new), outs)]
                written = [files(os.path.dirname(o)) for o in outs]
                if codes[0] != codes[1] or written[0] != written[1]:
                    differing = sorted(n for n in written[0].keys() | written[1].keys()
                                       if written[0].get(n) != written[1].get(n))
                    print(f"{source} --to {' '.join(target)}: exit {codes[0]} and {codes[1]}; {', '.join(differing)}")
                    different += 1
                elif codes[0]:
                    refused += 1
                else:
                    same += 1
    print(f"{same} outputs with the same bytes, {refused} refused by both, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
