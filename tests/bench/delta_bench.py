#!/usr/bin/env python3
"""Size and speed of deltas, compared with xdelta3 and zstd (Debian's packages), medians of interleaved runs.

  cmake --preset release && cmake --build --preset release
  tests/bench/delta_bench.py --python PYTHON [--rounds 3] [--work DIRECTORY] [--size 1.0]

PYTHON has torch and transformers (tests/interop/venv.sh). Makes in DIRECTORY:
  trained  two saves, one step apart, of a Llama of 29 million parameters that torch trains in bfloat16, and two of float32
  rl       a model of --size GB in bfloat16, and the same with one element of a hundred moved by the last bit, as a step of
           reinforcement learning leaves it (99 % of the elements are equal)
and times, each with its peak memory and the size of what it makes relative to the new model:
  delta, patch    reshard's, on two threads
  zstd            zstd -1 -T2 of the new model by itself
  zstd patch      zstd -1 -T2 --patch-from=OLD, where it takes files of that size
  xdelta3         xdelta3 -e -S none -s OLD, once and only of models below 0.1 GB: it takes minutes
Every output is removed before the next run. Figures go to docs/benchmarks.md with this command.
"""
import os
import pathlib
import subprocess
import sys

import interleaved

sys.path.insert(0, os.path.join(interleaved.ROOT, "tests", "interop"))
import watch_run

SHAPE = {"hidden": 512, "layers": 8}
TRAIN = "import sys, pathlib; sys.path.insert(0, {path!r}); import watch_run; watch_run.train(pathlib.Path({run!r}), {last}, every=1, first={first}, **{shape!r})"
CHANGE = """
import numpy, sys
data = numpy.memmap(sys.argv[1], mode="r+")
begin = 8 + int(data[:8].view("<u8")[0])
begin += begin % 2
elements = data[begin:begin + (len(data) - begin) // 2 * 2].view("<u2")
for at in range(0, len(elements), 1 << 24):
    part = elements[at:at + (1 << 24)]
    part ^= numpy.random.default_rng(at).random(len(part), dtype="float32") < 0.01
"""


def trained(bench, dtype):
    """The paths of two converted saves of a run, of steps 20 and 21."""
    run = pathlib.Path(bench.path(f"run-{dtype}"))
    if not run.exists():
        run.mkdir()
        code = TRAIN.format(path=os.path.dirname(watch_run.__file__), run=str(run), first=20, last=21,
                            shape={**SHAPE, "dtype": dtype})
        subprocess.run([bench.args.python, "-W", "ignore", "-c", code], check=True)
    return [bench.made(f"{dtype}-{step}", "convert", str(run / f"step-{step}"), None, "--to", "hf") for step in (20, 21)]


def moved(bench):
    """The paths of a model in bfloat16 and of the same with one element of a hundred changed."""
    layers = max(1, round(bench.args.size * 1e9 / 2 / (12.5 * 2048 * 2048)))
    config = watch_run.config(hidden=2048, layers=layers, dtype="bfloat16")
    path = pathlib.Path(bench.path("rl.json"))
    path.write_text(watch_run.json.dumps(config))
    paths = [bench.made(name, "synth", None, "--config", str(path), "--dtype", "bfloat16", "--to", "hf") for name in ("old", "new")]
    mark = pathlib.Path(bench.path("changed"))
    if not mark.exists():
        for file in interleaved.files_of(paths[1]):
            subprocess.run([bench.args.python, "-c", CHANGE, file], check=True)
        mark.touch()
    return paths


def compare(bench, name, old, new):
    before, after = interleaved.files_of(old), interleaved.files_of(new)
    out, delta, size = bench.path("out"), bench.path("kept.h5"), interleaved.size_of(after)
    for path in (out, delta):
        if os.path.exists(path):
            os.remove(path)
    subprocess.run([bench.reshard, "delta", old, new, delta, "-q"], check=True)

    def each(command):
        """A command on each pair of files, whose outputs come one after another."""
        return ["sh", "-c", " && ".join(f"{command.format(old=a, new=b)} >> '{out}'" for a, b in zip(before, after))]

    sides = {"delta": [bench.reshard, "delta", old, new, out, "-q", "--threads", "2"],
             "patch": [bench.reshard, "patch", old, delta, out, "--to", "hf", "-q", "--threads", "2"],
             "zstd": each("zstd -q -1 -T2 -c '{new}'"),
             "zstd patch": each("zstd -q -1 -T2 --long=30 --patch-from='{old}' -c '{new}'")}
    times, memory, made = bench.rounds(sides, out, before + after)
    if size < 1e8:
        seconds, usage, made["xdelta3"] = interleaved.run_once(each("xdelta3 -e -S none -c -s '{old}' '{new}'"), out)
        times["xdelta3"], memory["xdelta3"] = [seconds], usage.ru_maxrss * 1024
    made["patch"] = size
    print(f"{name}: {size / 1e9:.2f} GB")
    rates = {side: size / 1e9 / seconds for side, seconds in interleaved.medians(times).items()}
    interleaved.print_table(times, {"% of new": {side: 100 * n / size for side, n in made.items()}, "GB/s": rates,
                                    "peak MiB": interleaved.mebibytes(memory)})
    os.remove(delta)


def main():
    options = {"python": {"default": sys.executable, "help": "has torch and transformers"},
               "size": {"type": float, "default": 1.0, "help": "GB of the model of 'rl'"}}
    with interleaved.bench(__doc__, rounds=3, **options) as bench:
        compare(bench, "trained, bfloat16", *trained(bench, "bfloat16"))
        compare(bench, "trained, float32", *trained(bench, "float32"))
        compare(bench, "rl, bfloat16", *moved(bench))


if __name__ == "__main__":
    main()
