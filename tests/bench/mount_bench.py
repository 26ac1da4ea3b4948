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
import argparse
import glob
import os
import shutil
import statistics
import subprocess
import tempfile
import time

import interleaved

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
    return seconds_of(["cat", *sorted(glob.glob(os.path.join(directory, "*.safetensors")))])


def first_byte(directory):
    file = sorted(glob.glob(os.path.join(directory, "*.safetensors")))[0]
    begin = time.perf_counter()
    with open(file, "rb", buffering=0) as f:
        f.read(1)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work")
    parser.add_argument("--python")
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    args = parser.parse_args()
    work = args.work or tempfile.mkdtemp(prefix="reshard-bench-")
    reshard = os.path.join(args.build, "reshard")
    source, real, place, large = (os.path.join(work, name) for name in ("source", "real", "mounted", "405b"))
    os.makedirs(place, exist_ok=True)
    if not os.path.isdir(source):
        subprocess.run([reshard, "synth", source, "--model", args.model, "--mesh", "tp=8", "-q"], check=True)
    if not os.path.isdir(real):
        subprocess.run([reshard, "convert", source, real, "--to", "hf", "-q"], check=True)
    if not os.path.isdir(large):
        subprocess.run([reshard, "synth", large, "--model", "llama3-405b", "--mesh", "pp=4,dp_shard=8,tp=8",
                        "--headers-only", "-q"], check=True)
    interleaved.read_once(glob.glob(os.path.join(source, "*.distcp")) + glob.glob(os.path.join(real, "*.safetensors")))
    times, peak = {}, 0

    def add(name, seconds):
        times.setdefault(name, []).append(seconds)

    for _ in range(args.rounds):
        add("real", cat(real))
        with Mount(reshard, source, place) as mount:
            add("first byte", first_byte(place))
        with Mount(reshard, source, place) as mount:
            add("mounted", cat(place))
        peak = max(peak, mount.peak)
        if args.python:
            add("real-load", seconds_of([args.python, "-c", LOAD, real]))
            with Mount(reshard, source, place) as mount:
                add("mount-load", seconds_of([args.python, "-c", LOAD, place]))
            peak = max(peak, mount.peak)
        add("inspect", seconds_of([reshard, "inspect", large]))
        with Mount(reshard, large, place) as mount:
            add("ready", mount.ready)
    base = {"mounted": "real", "mount-load": "real-load", "ready": "inspect"}
    print(f"{args.rounds} rounds; peak memory of the mount {peak / 2**20:.1f} MiB")
    for name, values in times.items():
        m = statistics.median(values)
        ratio = f"{m / statistics.median(times[base[name]]):6.2f} x {base[name]}" if name in base else ""
        print(f"{name:11} {m:8.4f} s  {min(values):8.4f} to {max(values):8.4f}  {ratio}")
    if not args.work:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
