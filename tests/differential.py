#!/usr/bin/env python3
"""What reshard takes and refuses beside what others do, over damaged files: the safetensors package, Python's
pickletools, h5py. Every disagreement is counted under its reason; one that docs/testing.md does not explain, and a
file that both take and see differently, is an error.

  tests/differential.py [--program build/release/reshard] [--cases 1000] [--seed 1]

Needs safetensors, numpy and h5py (tests/interop/venv.sh); what is not there is skipped with a word.
"""
import argparse
import collections
import io
import json
import os
import pathlib
import pickletools
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
REFUSED = (2, 3, 4, 5)


class Reshard:
    """The program on one path at a time."""

    def __init__(self, program):
        self.program = program

    def refusal(self, path):
        """What verify says against it, bytes and all; empty: nothing."""
        run = subprocess.run([self.program, "verify", str(path)], capture_output=True, timeout=120, text=True, errors="replace")
        if run.returncode not in (0, 1, *REFUSED):
            return f"CRASH: ended with {run.returncode}"
        errors = re.findall(r"^(?:reshard: )?error:? +(.*)", run.stdout + run.stderr, re.M)
        if run.returncode not in (0, 1) and not errors:
            return f"CRASH: ended with {run.returncode} and no word"
        return errors[0] if errors else ""  # warnings are not refusals

    def inspect(self, path):
        """(tensors by name: (dtype, shape), "") or (None, why not)."""
        run = subprocess.run([self.program, "inspect", "--json", str(path)], capture_output=True, timeout=120)
        error = run.stderr.decode(errors="replace").strip().splitlines()
        if run.returncode == 0:
            report = json.loads(run.stdout)
            return {t["name"]: (t["dtype"], tuple(t["shape"])) for t in report["tensors"]}, ""
        if not error and run.stdout:  # the report of a file that is cut short
            error = json.loads(run.stdout)["problems"]
        if run.returncode not in REFUSED or not error:
            return None, f"CRASH: ended with {run.returncode}" + ("" if error else " and no word")
        return None, error[-1]


def damaged(rng, data, most=4):
    """The bytes with a few of them changed, cut, doubled or taken out."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        if not out:
            break
        at = rng.randrange(len(out))
        way = rng.randrange(10)
        if way < 4:
            out[at] ^= 1 << rng.randrange(8)
        elif way < 7:
            out[at] = rng.randrange(256)
        elif way == 7:
            del out[at : at + rng.randint(1, 8)]
        elif way == 8:
            out[at:at] = out[at : at + rng.randint(1, 8)]
        else:
            del out[at:]
    return bytes(out)


class Counts:
    """Of one comparison: what agreed, what did not and why."""

    def __init__(self, title, explained):
        self.title, self.explained = title, explained
        self.agreed = collections.Counter()
        self.differed = collections.Counter()
        self.example = {}

    def agree(self, how):
        self.agreed[how] += 1

    def differ(self, reason, example):
        self.differed[reason] += 1
        self.example.setdefault(reason, example)

    def report(self):
        """Prints; the number of disagreements that nothing explains."""
        print(f"{self.title}: {sum(self.agreed.values()) + sum(self.differed.values())} files, "
              + ", ".join(f"{how} {n}" for how, n in sorted(self.agreed.items())))
        unexplained = 0
        for reason, n in self.differed.most_common():
            known = any(re.search(e, reason) for e in self.explained)
            unexplained += 0 if known else n
            print(f"  {'' if known else 'NOT EXPLAINED '}{n}: {reason}" + ("" if known else f"   ({self.example[reason]})"))
        return unexplained


def without_numbers(text):
    return re.sub(r"'[^']*'", "'..'", re.sub(r"0x[0-9a-f]+|-?\d[\d,.]*", "N", text))


# ---- safetensors

SAFETENSORS_EXPLAINED = [
    r"^reshard alone: .*header: expected '\.\.', got",  # the format requires a brace as the first byte; serde skips blanks
    r"^reshard alone: .*(more than|at most|deeper)",  # named limits
    r"^reshard alone: .*dtype",  # types of less than a byte
    r"^reshard alone: .*twice",  # a duplicate member: serde takes the last
    r"^safetensors alone: .*not fully covered",  # bytes of no tensor: a warning of verify, which exits with 1
]


def safetensors_seeds():
    import numpy as np
    from safetensors.numpy import save

    rng = np.random.default_rng(1)
    yield save({"a": rng.random((3, 2), dtype=np.float32), "b.c": np.arange(5), "empty": np.zeros((0, 4), np.float16)},
               metadata={"format": "pt", "x": "y"})
    yield save({f"layers.{i}.w": np.full((2, i + 1), i, np.uint8) for i in range(6)})
    yield save({})
    yield save({"scalar": np.array(1.5), "bool": np.array([True, False])})


def edited_header(rng, data):
    """The file with a header that is still JSON, and says something else."""
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].decode()
    way = rng.randrange(6)
    if way == 0:
        text = re.sub(r"\d+", lambda m: rng.choice([m.group(), m.group(), "0", "-1", "1e1", "18446744073709551615",
                                                    str(int(m.group()) + 1)]), text)
    elif way == 1:
        text = re.sub(r'"(F32|I64|U8|F16|F64|BOOL)"', lambda m: '"%s"' % rng.choice(
            ["F32", "I64", "U8", "F4", "F6_E2M3", "F8_E8M0", "C64", "BF16", "X", "f32"]), text)
    elif way == 2:
        text = text.replace("shape", rng.choice(["shape", "Shape", "dtype"]), 1)
    elif way == 3:
        text = text[:-1].rstrip() + rng.choice([",}", ' ,"z":1}', ',"__metadata__":{}}', ',"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "}}"])
    elif way == 4:
        text = rng.choice([" ", "\t", "\n", "\ufeff"]) + text
    else:
        text += " " * rng.randrange(1, 20) + rng.choice(["", "", "\0", "x"])
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]


SAFETENSORS_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
                     "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
                     "U8": "uint8", "BOOL": "bool", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
                     "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}


def compare_safetensors(reshard, rng, cases, directory):
    from safetensors import SafetensorError, safe_open

    counts = Counts("safetensors", SAFETENSORS_EXPLAINED)
    seeds = list(safetensors_seeds())
    path = directory / "case.safetensors"
    for _ in range(cases):
        seed = rng.choice(seeds)
        data = edited_header(rng, seed) if rng.randrange(2) else damaged(rng, seed)
        path.write_bytes(data)
        theirs = None
        try:
            with safe_open(str(path), "np") as f:
                theirs = {}
                for name in f.keys():
                    piece = f.get_slice(name)
                    theirs[name] = (piece.get_dtype(), tuple(piece.get_shape()))
        except (SafetensorError, OSError, ValueError) as e:
            their_error = str(e)
        our_error = reshard.refusal(path)
        ours, our_error = (None, our_error) if our_error else reshard.inspect(path)
        example = data[:200].hex()
        if our_error.startswith("CRASH"):
            counts.differ(our_error, example)
        elif ours is None and theirs is None:
            counts.agree("refused by both")
        elif ours is None:
            counts.differ("reshard alone: " + without_numbers(our_error.replace(str(path), "F")), example)
        elif theirs is None:
            counts.differ("safetensors alone: " + without_numbers(their_error.replace(str(path), "F")), example)
        elif {n: (SAFETENSORS_TYPES.get(d, d), s) for n, (d, s) in theirs.items()} != ours:
            counts.differ("seen differently", example)
        else:
            counts.agree("taken by both")
    return counts.report()


# ---- pickles

PICKLE_EXPLAINED = [
    r"^reshard alone: ",  # opcodes that data does not need, and types: pickletools checks syntax and the depth of the stack
    r"^pickletools alone: UnicodeDecodeError",  # text that is not UTF-8 is read and shown escaped
]


def pickle_seeds():
    for name in ("dcp_small/ck1", "dcp_small/ck2", "dcp_small/ckf_fsdp"):
        yield HERE / "data" / name


def compare_pickles(reshard, rng, cases, directory):
    counts = Counts("pickletools", PICKLE_EXPLAINED)
    seeds = list(pickle_seeds())
    of_machine = re.compile(r"\.metadata@0x[0-9a-f]+: (opcode 0x..|[A-Z_0-9]+|end of the pickle): ")
    for _ in range(cases):
        seed = rng.choice(seeds)
        case = directory / "checkpoint"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(seed, case)
        data = damaged(rng, (seed / ".metadata").read_bytes(), 2)
        (case / ".metadata").write_bytes(data)
        their_error = ""
        try:
            pickletools.dis(data, out=io.StringIO())
        except Exception as e:  # ValueError is documented; others come from its decoders
            their_error = f"{type(e).__name__}: {e}"
        _, error = reshard.inspect(case)
        machine = of_machine.search(error)
        our_error = error[machine.start() :].split(": ", 1)[1] if machine else ""
        example = data.hex() if len(data) < 200 else f"damage of {seed.name}"
        if error.startswith("CRASH"):
            counts.differ(error, example)
        elif bool(our_error) == bool(their_error):
            counts.agree("refused by both" if our_error else "taken by both")
        elif our_error:
            counts.differ("reshard alone: " + without_numbers(our_error)[:110], example)
        else:
            counts.differ("pickletools alone: " + without_numbers(their_error)[:110], example)
    return counts.report()


# ---- HDF5

HDF5_EXPLAINED = [
    r"^reshard alone: ",  # it requires that everything can be read, is inside the file, and is claimed once
    # h5py stops at the first dataset that cannot be opened or has a type that NumPy lacks; reshard warns.
    r"^h5py alone: (KeyError|RuntimeError|OSError|TypeError|ValueError)$",
    r"^fewer in reshard: ",  # datasets that are not tensors: texts, compounds, unknown filters
]


def hdf5_seeds(directory):
    import h5py
    import numpy as np

    rng = np.random.default_rng(1)
    for number, version in enumerate(("earliest", "v110", "v112")):
        path = directory / f"seed{number}.h5"
        with h5py.File(path, "w", libver=(version, "latest" if version == "v112" else version if version != "earliest" else "latest")) as f:
            f["a/w"] = rng.random((4, 6), dtype=np.float32)
            f.create_dataset("a/chunked", data=np.arange(96).reshape(8, 12), chunks=(4, 5), compression="gzip")
            f.create_dataset("a/plain_chunks", data=np.arange(30, dtype=np.uint8), chunks=(7,))
            f["b"] = np.float16(2)
        yield path.read_bytes()


def h5py_sees(path):
    """What h5py sees of a file, in a process of its own: ({name: (dtype, shape)} or None, why not)."""
    import h5py

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            found = {}
            with h5py.File(path, "r") as f:
                f.visititems(lambda name, item: found.update({name: (str(item.dtype), tuple(item.shape))})
                             if isinstance(item, h5py.Dataset) and item.dtype.kind in "fiub" and item.shape is not None else None)
            answer = {"seen": {n: [d, list(s)] for n, (d, s) in found.items()}}
        except BaseException as e:  # of any kind
            answer = {"error": f"{type(e).__name__}"}
        with os.fdopen(write, "w") as out:
            json.dump(answer, out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    if status != 0 or not text:
        return None, f"died of signal {os.WTERMSIG(status)}"
    answer = json.loads(text)
    if "error" in answer:
        return None, answer["error"]
    return {n: (d, tuple(s)) for n, (d, s) in answer["seen"].items()}, ""


def compare_hdf5(reshard, rng, cases, directory):
    counts = Counts("h5py", HDF5_EXPLAINED)
    seeds = list(hdf5_seeds(directory))
    path = directory / "case.h5"
    for _ in range(cases):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        theirs, their_error = h5py_sees(path)
        ours, our_error = reshard.inspect(path)
        if ours is not None:
            ours = {name.replace(".", "/"): what for name, what in ours.items()}
        example = "seed, damaged"
        if our_error.startswith("CRASH"):
            counts.differ(our_error, example)
        elif ours is None and theirs is None:
            counts.agree("refused by both")
        elif ours is None:
            counts.differ("reshard alone: " + without_numbers(our_error.replace(str(path), "F"))[:110], example)
        elif theirs is None:
            counts.differ("h5py alone: " + their_error, example)
        elif ours == {n.replace(".", "/"): w for n, w in theirs.items()}:
            counts.agree("taken by both")
        elif set(ours) < set(theirs):
            counts.differ("fewer in reshard: it warns and leaves them out", example)
        else:
            counts.differ("seen differently", f"{ours} / {theirs}")
    return counts.report()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(HERE.parent / "build/release/reshard"))
    parser.add_argument("--cases", type=int, default=1000, help="of each of the three")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    reshard = Reshard(options.program)
    unexplained = 0
    for needs, compare in (("safetensors", compare_safetensors), ("pickletools", compare_pickles), ("h5py", compare_hdf5)):
        try:
            __import__(needs)
        except ImportError:
            print(f"{needs}: skipped, it is not here")
            continue
        with tempfile.TemporaryDirectory() as directory:
            unexplained += compare(reshard, random.Random(options.seed), options.cases, pathlib.Path(directory))
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
