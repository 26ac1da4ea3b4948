"""What the benches share: a directory for what they make, and commands run in turn, each with its time and its peak memory."""
import argparse
import contextlib
import glob
import os
import shutil
import statistics
import subprocess
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Bench:
    """`args` of the command line, the program under test, and files in the work directory."""

    def __init__(self, args, work):
        self.args, self.work, self.processor = args, work, {}
        self.reshard = os.path.join(args.build, "reshard")

    def path(self, name):
        return os.path.join(self.work, name)

    def made(self, name, command, *words):
        """The path of what `reshard command ... NAME words` writes, if it is not there yet: words of None are the path."""
        path = self.path(name)
        if not os.path.exists(path):
            words = [path if word is None else word for word in words]
            subprocess.run([self.reshard, command, *words, "-q"], check=True)
        return path

    def model(self, name, *options):
        """The path of a checkpoint of --model."""
        return self.made(name, "synth", None, "--model", self.args.model, *options)

    def rounds(self, commands, out, files):
        """Times {name: command}, each of which makes `out` of `files` (a list, or {name: list}), --rounds times in turn:
        {name: [seconds]}, {name: peak}, {name: size}; and in `processor` {name: [seconds of the processor]}."""
        times, memory, made = {name: [] for name in commands}, dict.fromkeys(commands, 0), {}
        self.processor = {name: [] for name in commands}
        for _ in range(self.args.rounds):
            for name, command in commands.items():
                read = files[name] if isinstance(files, dict) else files
                seconds, usage, made[name] = timed(command, out, read, self.work, getattr(self.args, "pause", 0))
                times[name].append(seconds)
                self.processor[name].append(usage.ru_utime + usage.ru_stime)
                memory[name] = max(memory[name], usage.ru_maxrss * 1024)
        return times, memory, made


@contextlib.contextmanager
def bench(description, rounds=7, **options):
    """A Bench with --rounds, --work, --model, --build and `options`, {name: add_argument's}; its directory goes unless given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--work", help="where files are made and kept; default: a temporary directory")
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"))
    for name, how in options.items():
        parser.add_argument("--" + name, **how)
    args = parser.parse_args()
    work = args.work or tempfile.mkdtemp(prefix="reshard-bench-")
    os.makedirs(work, exist_ok=True)
    try:
        yield Bench(args, work)
    finally:
        if not args.work:
            shutil.rmtree(work)


PAUSE = {"type": float, "default": 0, "help": "seconds of rest before each run"}


def files_of(directory):
    """Its files of tensors, in order."""
    return sorted(f for kind in ("distcp", "safetensors", "bin") for f in glob.glob(os.path.join(directory, "*." + kind)))


def size_of(files):
    return sum(map(os.path.getsize, files))


def cat(files, out):
    return "cat " + " ".join(f"'{f}'" for f in files) + f" > '{out}'"


def read_once(files):
    """Brings files into the page cache."""
    for file in files:
        with open(file, "rb") as f:
            while f.read(1 << 22):
                pass


def timed(command, out, files, work, pause):
    """Runs a command that makes `out`, once `files` are cached and `work`'s file system has nothing left to write.

    Its seconds, what it used (getrusage), and the size of `out` where that is a file (0 otherwise). `out` is removed.
    """
    read_once(files)
    subprocess.run(["sync", "-f", work], check=True)
    time.sleep(pause)
    return run_once(command, out)


def run_once(command, out):
    """The same as it is, with nothing done before."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if status != 0:
        raise SystemExit(f"failed: {command}")
    made = os.path.getsize(out) if os.path.isfile(out) else 0
    if os.path.isdir(out):
        shutil.rmtree(out)
    elif os.path.exists(out):
        os.remove(out)
    return seconds, usage, made


def medians(times):
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def ratios(times, base):
    """Medians over that of `base`, or over that of base[name] where it has one."""
    m = medians(times)
    bases = base if isinstance(base, dict) else dict.fromkeys(times, base)
    return {name: m[name] / m[bases[name]] for name in times if name in bases}


def mebibytes(sizes):
    return {name: size / 2**20 for name, size in sizes.items()}


def print_table(times, columns):
    """A row for each name: median, least and most seconds, and of each column {name: figure} what it has."""
    wide = max(map(len, times))
    print(" " * wide, "".join(f"{head:>{max(9, len(head) + 2)}}" for head in ("median s", "min", "max", *columns)))
    for name, seconds in times.items():
        row = "".join(f"{t:9.3f}" if i else f"{t:10.3f}" for i, t in
                      enumerate((statistics.median(seconds), min(seconds), max(seconds))))
        for head, figures in columns.items():
            row += f"{format(figures[name], '.2f') if name in figures else '':>{max(9, len(head) + 2)}}"
        print(f"{name:{wide}} {row}")
