"""Times the Python package against the library's load and against torch's, interleaved.

    python tests/bench/python_bench.py [DIRECTORY]      of a Python with reshard, NumPy and torch; needs 5 GB there (default: .)

Each figure is the median of the rounds, warm. Seconds to read every tensor of a TP=8 DCP checkpoint (Llama 1B, bfloat16), in
all orders:

    numpy    tensor by tensor into new NumPy arrays
    load     by the library's load (reshard.load), into new arrays
    torch    by torch.distributed.checkpoint.load in one process, into new tensors

beside them the processor's time of all threads, which other work on the machine changes less. Milliseconds for 1 MB of a tensor of
1 GB; and of the processor for `import reshard`, beside those of a Python that does nothing.

Where the first touch of memory is dear (a virtual machine), MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999 keep what the
warming round has touched, for all ways alike.
"""

import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import numpy

import reshard



def numpy_reads(path):
    with reshard.open(path) as checkpoint:
        return [tensor.numpy() for tensor in checkpoint.values()]


def library_loads(path):
    return reshard.load(path)


def torch_loads(path):
    import torch
    import torch.distributed.checkpoint as dcp

    facts = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in facts.items() if hasattr(t, "size")}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def main():
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as directory:
        path = pathlib.Path(directory) / "tp8"
        program = [sys.executable, "-m", "reshard", "synth", str(path), "--model", "llama3-1b", "--mesh", "tp=8", "-q"]
        subprocess.run(program, check=True)
        ways = {"numpy": numpy_reads, "load": library_loads, "torch": torch_loads}
        seconds = {name: [] for name in ways}
        processor = {name: [] for name in ways}
        for round_number, order in enumerate([list(ways), *itertools.permutations(ways)]):  # the first warms the page cache
            for name in order:
                begin, begin_processor = time.perf_counter(), time.process_time()
                held = ways[name](str(path))
                if round_number:
                    seconds[name].append(time.perf_counter() - begin)
                    processor[name].append(time.process_time() - begin_processor)
                del held
        bytes_in_all = reshard.open(path).nbytes
        for name, times in seconds.items():
            t = statistics.median(times)
            print(f"{name:6} {t:.3f} s  {bytes_in_all / t / 1e9:.2f} GB/s  ({min(times):.3f} to {max(times):.3f})"
                  f"  processor {statistics.median(processor[name]):.3f} s")  # fmt: skip

        array = numpy.zeros((256, 1 << 20), "float32")
        header = b'{"t":{"dtype":"F32","shape":[256,1048576],"data_offsets":[0,1073741824]}}'
        file = pathlib.Path(directory) / "one.safetensors"
        with open(file, "wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            array.tofile(out)
        with reshard.open(file) as checkpoint:
            times = []
            for i in range(200):
                begin = time.perf_counter()
                checkpoint["t"][i, : 1 << 18]
                times.append(1e3 * (time.perf_counter() - begin))
            print(f"slice  {statistics.median(times):.2f} ms for 1 MB of 1 GB  ({min(times):.2f} to {max(times):.2f})")

        runs = {"pass": [], "import reshard": []}
        for _ in range(40):
            for code, times in runs.items():
                _, _, usage = os.wait4(subprocess.Popen([sys.executable, "-c", code]).pid, 0)
                times.append(1e3 * (usage.ru_utime + usage.ru_stime))
        bare, ours = (statistics.median(times) for times in runs.values())
        print(f"import {ours - bare:.1f} ms of the processor beside {bare:.1f} of Python itself")
        print("load of the machine", *(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
