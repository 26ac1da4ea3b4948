#!/usr/bin/env python3
"""Reading through the page cache, past it, and past it with an io_uring, on several file systems, cold and warm.

  cmake --preset release -DRESHARD_BENCH=ON && cmake --build --preset release --target reshard cold_reads
  tests/bench/cold_bench.py [--rounds 5] [--systems ext4,xfs,btrfs] [--images DIRECTORY] [--before RESHARD]

For root: each file system is made in a sparse file of 8 GB in DIRECTORY, mounted through a loop device, which reads the
image past the page cache, and removed. It holds a checkpoint of --model. Rows are in turn: `cold_reads` in each of its
ways, alone and copying, `verify` and `convert --to hf`; with --before the last two of that program too, and nothing of
`cold_reads`. Cold: files are dropped from the page cache before each run.
"""
import os
import subprocess
import tempfile

import interleaved

THREADS = "4"


def forget(files):
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(command, out, files, work, is_cold):
    """As interleaved.timed(), of files that are in the page cache or not."""
    subprocess.run(["sync", "-f", work], check=True)
    forget(files) if is_cold else interleaved.read_once(files)
    seconds, usage, _ = interleaved.run_once(command, out)
    return seconds, usage.ru_utime + usage.ru_stime


def measure(bench, system, mounted):
    source, out = os.path.join(mounted, "source"), os.path.join(mounted, "out")
    subprocess.run([bench.reshard, "synth", source, "--model", bench.args.model, "--mesh", "tp=8", "-q"], check=True)
    files = interleaved.files_of(source)
    reads = os.path.join(bench.args.build, "tests/bench/cold_reads")
    before = bench.args.before
    rows = {} if before else {f"{way}, {what}": [reads, way, THREADS, to, *files]
                              for what, to in (("read", "-"), ("copied", out)) for way in ("cached", "direct", "uring")}
    for words in (["verify", source], ["convert", source, out, "--to", "hf"]):
        if before:
            rows[f"before: {words[0]}"] = [before, *words, "-q"]
        rows[f"reshard {words[0]}"] = [bench.reshard, *words, "-q"]
    for is_cold in (True, False):
        times, processor = {row: [] for row in rows}, {row: [] for row in rows}
        for _ in range(bench.args.rounds):
            for row, command in rows.items():
                seconds, cpu = timed(command, out, files, mounted, is_cold)
                times[row].append(seconds)
                processor[row].append(cpu)
        print(f"{system}, {'cold' if is_cold else 'warm'}")
        interleaved.print_table(times, {"CPU s": interleaved.medians(processor)})


def main():
    options = {"systems": {"default": "ext4,xfs,btrfs"}, "images": {"default": tempfile.gettempdir()},
               "before": {}}
    with interleaved.bench(__doc__, rounds=5, **options) as bench:
        for system in bench.args.systems.split(","):
            image, mounted = os.path.join(bench.args.images, f"reshard-{system}.img"), bench.path(system)
            os.mkdir(mounted)
            with open(image, "xb") as f:
                f.truncate(8 << 30)
            try:
                subprocess.run([f"mkfs.{system}", "-q", image], check=True)
                device = subprocess.run(["losetup", "--find", "--show", "--direct-io=on", image], check=True,
                                        capture_output=True, text=True).stdout.strip()
                try:
                    subprocess.run(["mount", device, mounted], check=True)
                    try:
                        measure(bench, system, mounted)
                    finally:
                        subprocess.run(["umount", mounted], check=True)
                finally:
                    subprocess.run(["losetup", "--detach", device], check=True)
            finally:
                os.remove(image)
                os.rmdir(mounted)


if __name__ == "__main__":
    main()
