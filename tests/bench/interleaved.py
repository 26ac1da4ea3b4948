"""What the benches share: commands run in turn, each with its time and its peak memory."""
import os
import shutil
import subprocess
import time


def read_once(files):
    """Brings files into the page cache."""
    for file in files:
        with open(file, "rb") as f:
            while f.read(1 << 22):
                pass


def timed(command, out, files, work, pause=0):
    """Runs a command that makes `out`, once `files` are cached and `work`'s file system has nothing left to write.

    Its seconds, its peak memory in bytes, and the size of `out` where that is a file (0 otherwise). `out` is removed.
    """
    read_once(files)
    subprocess.run(["sync", "-f", work], check=True)
    time.sleep(pause)
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
    return seconds, usage.ru_maxrss * 1024, made


def rounds(n, sides, out, work, pause=0):
    """Times every side, {name: (files, command)}, n times in turn: {name: [seconds]}, {name: peak}, {name: size}."""
    times, memory, made = {name: [] for name in sides}, dict.fromkeys(sides, 0), {}
    for _ in range(n):
        for name, (files, command) in sides.items():
            seconds, peak, made[name] = timed(command, out, files, work, pause)
            times[name].append(seconds)
            memory[name] = max(memory[name], peak)
    return times, memory, made
