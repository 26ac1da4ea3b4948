#!/usr/bin/env python3
"""Speed of a mount against the files that convert writes, as ratios of interleaved runs (A B A B ...), medians.

  cmake --preset release && cmake --build --preset release
  tests/bench/mount_bench.py [--rounds 7] [--work DIRECTORY] [--python PYTHON] [--model llama3-1b]

Makes a TP=8 checkpoint with `reshard synth` in DIRECTORY (default: a temporary one; it needs about three times the model's
size) and converts it, then times, the source in the page cache and each mount new:
  real, mounted          cat of all safetensors files to /dev/null
  real-load, mount-load  from_pretrained with --python's transformers, whole processes, once a round if asked for
  first byte             of a safetensors file, from its open on
  inspect, ready         of Llama 405B by 256 ranks (files of holes): `reshard inspect`, and a mount until it can be listed
and tells the peak memory of the mount's process. Figures go to docs/benchmarks.md with this command.
"""
import os
import subprocess
import time

import interleaved

LOAD = """import sys, torch, transformers
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)"""


class Mount:
    """A checkpoint seen as another; `ready`: the seconds until it was, `peak`: bytes of its process in the end."""

    def __init__(self, reshard, source, place):
        begin = time.perf_counter()
        self.place = place
        self.process = subprocess.Popen([reshard, "mount", source, place, "--as", "hf", "-q"],
                                        stdout=subprocess.DEVNULL)
        while not os.path.ismount(place):
            if self.process.poll() is not None:
                raise SystemExit("the mount failed")
            time.sleep(0.001)
        os.listdir(place)
        self.ready = time.perf_counter() - begin

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        _, _, usage = os.wait4(self.process.pid, 0)
        self.peak = usage.ru_maxrss * 1024


def seconds_of(command):
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def cat(directory):
    return seconds_of(["cat", *interleaved.files_of(directory)])


def first_byte(directory):
    file = interleaved.files_of(directory)[0]
    begin = time.perf_counter()
    with open(file, "rb", buffering=0) as f:
        f.read(1)
    return time.perf_counter() - begin


def main():
    with interleaved.bench(__doc__, python={"help": "one with transformers"}) as bench:
        python, reshard = bench.args.python, bench.reshard
        source = bench.model("source", "--mesh", "tp=8")
        real = bench.made("real", "convert", source, None, "--to", "hf")
        large = bench.made("405b", "synth", None, "--model", "llama3-405b", "--mesh", "pp=4,dp_shard=8,tp=8",
                           "--headers-only")
        place = bench.path("mounted")
        os.makedirs(place, exist_ok=True)
        interleaved.read_once(interleaved.files_of(source) + interleaved.files_of(real))
        times, peak = {}, 0

        def add(name, seconds):
            times.setdefault(name, []).append(seconds)

        for _ in range(bench.args.rounds):
            add("real", cat(real))
            with Mount(reshard, source, place):
                add("first byte", first_byte(place))
            with Mount(reshard, source, place) as mount:
                add("mounted", cat(place))
            peak = max(peak, mount.peak)
            if python:
                add("real-load", seconds_of([python, "-c", LOAD, real]))
                with Mount(reshard, source, place) as mount:
                    add("mount-load", seconds_of([python, "-c", LOAD, place]))
                peak = max(peak, mount.peak)
            add("inspect", seconds_of([reshard, "inspect", large]))
            with Mount(reshard, large, place) as mount:
                add("ready", mount.ready)
        print(f"{bench.args.rounds} rounds; peak memory of the mount {peak / 2**20:.1f} MiB")
        bases = {"mounted": "real", "mount-load": "real-load", "ready": "inspect"}
        interleaved.print_table(times, {"/ base": interleaved.ratios(times, {k: v for k, v in bases.items() if k in times})})


if __name__ == "__main__":
    main()
