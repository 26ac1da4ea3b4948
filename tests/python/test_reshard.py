"""The Python package, as it is installed: what it reads is held against the bytes of the files.

    python tests/python/test_reshard.py [-k PATTERN]      of a Python that has reshard and NumPy

torch and ml_dtypes are used where they are there. The last line is `python: N passed, N failed, N skipped`.
"""

import ast
import collections.abc
import concurrent.futures
import contextlib
import copy
import ctypes
import dataclasses
import errno
import importlib.util
import inspect
import io
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
import unittest
import unittest.mock
import warnings

import numpy

import reshard
import reshard._words

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data"
FSDP = DATA / "fsdp/fsdp2_tp2"  # six ranks of FSDP and TP
WHOLE = DATA / "fsdp/fsdp2_tp2.safetensors"  # the same in one file
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_ML_DTYPES = importlib.util.find_spec("ml_dtypes") is not None
HAS_DLPACK = hasattr(numpy, "from_dlpack")
HAS_NBCLIENT = all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel"))
HAS_MYPY = importlib.util.find_spec("mypy") is not None
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
               "U8": "u1", "BOOL": "?", "F8_E4M3": "u1", "F8_E5M2": "u1"}  # fmt: skip


def raw_safetensors(path):
    """{name: array} of a safetensors file, by the letter of the format; bfloat16 and float8 as their bits."""
    data = pathlib.Path(path).read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    out = {}
    for name, t in header.items():
        begin, end = t["data_offsets"]
        out[name] = numpy.frombuffer(data[8 + n + begin : 8 + n + end], NUMPY_TYPES[t["dtype"]]).reshape(t["shape"])
    return out


def write_safetensors(path, tensors):
    """tensors: {name: (safetensors' dtype, array)}."""
    header, blobs, at = {}, [], 0
    for name, (dtype, array) in tensors.items():
        blob = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def program(*arguments, code=0):
    """Runs the program that is installed beside this Python."""
    done = subprocess.run(
        [sys.executable, "-m", "reshard", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    if done.returncode != code:
        raise AssertionError(f"reshard {arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def bits(array):
    """An array as unsigned integers of its elements' size."""
    return numpy.ascontiguousarray(array).view(f"u{array.dtype.itemsize}") if array.dtype.kind != "b" else array


class OnlyDlpack:
    """A tensor of which nothing is known but that it speaks DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, max_version=None):
        return self.tensor.__dlpack__(max_version=max_version)


class OldDlpack(OnlyDlpack):
    def __dlpack__(self):
        return self.tensor.__dlpack__()


class FlaggedDlpack(OnlyDlpack):
    """One that says of its memory that it is read-only (1) or a copy (2)."""

    def __init__(self, tensor, flag):
        super().__init__(tensor)
        self.flag = flag

    def __dlpack__(self, max_version=None):
        capsule = self.tensor.__dlpack__(max_version=(1, 0))
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_uint64.from_address(pointer(capsule, b"dltensor_versioned") + 24).value = self.flag
        return capsule


MYPY_CACHE = tempfile.TemporaryDirectory()  # reading the types of NumPy takes seconds


def mypy(file, *options):
    return subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", MYPY_CACHE.name, *options, file],
                          capture_output=True, text=True, timeout=300)  # fmt: skip


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.tmp = pathlib.Path(cls.directory.name)

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def assert_same(self, a, b):
        self.assertEqual(a.shape, b.shape)
        numpy.testing.assert_array_equal(bits(a), bits(b))


class Reading(Case):
    def test_every_tensor_of_sharded_ranks_has_the_bytes_of_the_whole_file(self):
        expected = raw_safetensors(WHOLE)
        with reshard.open(FSDP) as checkpoint:
            self.assertEqual(checkpoint.format, "fsdp")
            self.assertEqual(checkpoint.mesh["tp"], 2)
            self.assertEqual(checkpoint.mesh["dp_shard"], 3)
            self.assertLessEqual(set(expected), set(checkpoint))
            for name, array in expected.items():
                self.assert_same(checkpoint[name].numpy(), array)
                self.assertEqual(checkpoint[name].shape, array.shape)
                self.assertEqual(checkpoint[name].nbytes, array.nbytes)

    def test_it_is_a_mapping(self):
        checkpoint = reshard.open(str(WHOLE))
        names = list(checkpoint)
        self.assertEqual(list(reshard.open(os.fsencode(WHOLE))), names)
        self.assertEqual(len(checkpoint), len(names))
        self.assertEqual(list(checkpoint.keys()), names)
        self.assertIn(names[0], checkpoint)
        self.assertNotIn("nothing", checkpoint)
        self.assertIsNone(checkpoint.get("nothing"))
        with self.assertRaises(KeyError):
            checkpoint["nothing"]
        self.assertEqual([t.name for t in checkpoint.values()], names)

    def test_pieces_lie_where_the_file_has_them(self):
        data = WHOLE.read_bytes()
        with reshard.open(WHOLE) as checkpoint:
            for name, tensor in checkpoint.items():
                (piece,) = tensor.pieces
                self.assertEqual(piece.file, WHOLE.name)
                self.assertEqual(piece.shape, tensor.shape)
                self.assertEqual(data[piece.offset : piece.offset + piece.length], tensor.numpy().tobytes(), name)
        with reshard.open(FSDP) as checkpoint:
            tensor = checkpoint["layers.0.w1"]
            whole = tensor.numpy()
            self.assertGreater(len(tensor.pieces), 3)
            for piece in tensor.pieces:
                box = whole[tuple(slice(o, o + n) for o, n in zip(piece.origin, piece.shape))]
                stored = (FSDP / piece.file).read_bytes()[piece.offset :][: box.nbytes]
                self.assertEqual(stored, box.tobytes())

    def test_slices_are_as_numpy_has_them(self):
        rng = numpy.random.default_rng(7)
        array = rng.standard_normal((37, 5, 29)).astype("f4")
        write_safetensors(self.tmp / "slices.safetensors", {"t": ("F32", array), "s": ("F32", array[0, 0, 0])})
        with reshard.open(self.tmp / "slices.safetensors") as checkpoint:
            t = checkpoint["t"]
            keys = [..., slice(3, 9), (slice(None), 2), (slice(None, None, 2), ..., slice(1, -1, 3)), -1, (0, 0, 0), (4, ..., -2),
                    slice(None, None, -1), (slice(30, 2, -4), slice(None, None, -2), 7), slice(5, 5), (slice(9, 3), 1),
                    (Ellipsis, slice(100, 200)), numpy.int64(3)]  # fmt: skip
            for key in keys:
                with self.subTest(key=key):
                    self.assert_same(t[key], array[key])
            for _ in range(200):
                key = tuple(
                    slice(*(int(v) for v in rng.integers(-40, 40, 2)), int(rng.choice([-7, -3, -1, 1, 2, 5])))
                    for _ in range(3)
                )
                self.assert_same(t[key], array[key])
            self.assertEqual(checkpoint["s"][()], array[0, 0, 0])
            self.assertEqual(checkpoint["s"].numpy().shape, ())
            for key in (37, (0, 5), (0, 0, 0, 0), (..., ...)):
                with self.assertRaises(IndexError):
                    t[key]
            for key in ([1, 2], None, numpy.array([True] * 37), 1.5, True):
                with self.assertRaises(TypeError):
                    t[key]
            self.assert_same(numpy.asarray(t), array)

    def test_the_index_of_any_python_integer_is_as_numpy_has_it(self):
        """Slices and indices of numbers that no machine word holds, and of what looks like one."""
        rng = numpy.random.default_rng(11)
        array = rng.standard_normal((5, 1, 7)).astype("f4")
        write_safetensors(self.tmp / "any.safetensors", {"t": ("F32", array), "e": ("F32", array[:0])})
        numbers = [None, 0, 1, -1, 4, 5, -5, -6, 7, *(sign * (2**bits + d) for bits in (31, 62, 63, 64, 100)
                                                    for d in (-1, 0, 1) for sign in (1, -1))]  # fmt: skip
        with reshard.open(self.tmp / "any.safetensors") as checkpoint:
            for name, whole in (("t", array), ("e", array[:0])):
                t = checkpoint[name]
                keys = [slice(None, None, n) for n in numbers if n != 0] + [n for n in numbers if n is not None]
                keys += [tuple(slice(numbers[i], numbers[j], numbers[k] or 1) for i, j, k in rng.integers(0, len(numbers), (3, 3)))
                         for _ in range(300)]  # fmt: skip
                keys += [numpy.uint64(2**63), numpy.array(3), (..., numpy.int8(-1)), slice(numpy.uint64(2**64 - 1)), slice(0, 5, 0)]
                for key in keys:
                    with self.subTest(name=name, key=key):
                        try:
                            expected = whole[key]
                        except (IndexError, OverflowError, ValueError) as error:  # NumPy overflows from 2**63 on
                            with self.assertRaises(ValueError if isinstance(error, ValueError) else IndexError):
                                t[key]
                        else:
                            self.assert_same(t[key], expected)
            for key in ([1, 2], numpy.array([3]), numpy.True_, False, "1", 1.0, None):
                with self.assertRaisesRegex(TypeError, r"only integers, slices and `\.\.\.`.*" + type(key).__name__):
                    checkpoint["t"][key]

    def test_every_character_of_a_name_counts(self):
        names = ["a", "a\0b", "a\0c", "\0", "é\0", "a\nb", "a\u202eb", "a b", "a*[b]", '"', "\\", "\U0001f600"]
        tensors = {name: ("F32", numpy.full(3, i, "f4")) for i, name in enumerate(names)}
        path = self.tmp / "names.safetensors"
        write_safetensors(path, tensors)
        with reshard.open(path) as checkpoint:
            self.assertEqual(set(checkpoint), set(names))
            for i, name in enumerate(names):
                self.assertEqual(checkpoint[name][0], i)
                self.assertEqual(list(checkpoint.view(include=[reshard._words.glob_escaped(name)], family="none")), [name])
            self.assertIn("12 tensors", repr(checkpoint))
        self.assertEqual({n: a[0] for n, a in reshard.load(path, family="none").items()}, {n: i for i, n in enumerate(names)})
        into = {name: numpy.zeros(3, "f4") for name in names}
        self.assertEqual(set(reshard.load(path, into=into, family="none").digests), set(names))
        self.assertEqual({t["name"] for t in reshard.inspect(path).tensors}, set(names))
        self.assertEqual({t["name"] for t in reshard.verify(path).tensors}, set(names))
        self.assertEqual({t.name for t in reshard.diff(path, path).tensors}, set(names))
        reshard.convert(path, self.tmp / "names", to="dcp", family="none")
        with reshard.open(self.tmp / "names") as checkpoint:
            self.assertEqual({n: t[0] for n, t in checkpoint.items()}, {n: i for i, n in enumerate(names)})

    def test_a_path_with_a_nul_is_no_other_path(self):
        for call in (lambda p: reshard.open(p), lambda p: reshard.load(p), lambda p: reshard.verify(p), lambda p: reshard.inspect(p),
                     lambda p: reshard.convert(WHOLE, p, to="hf"), lambda p: reshard.verify(WHOLE, config=p)):  # fmt: skip
            with self.assertRaises(reshard.UsageError):
                call(f"{WHOLE}\0x")

    def test_large_slices_across_shards(self):
        array = numpy.arange(3 * 2048 * 1024, dtype="f4").reshape(2048, 3072)
        write_safetensors(self.tmp / "large.safetensors", {"t": ("F32", array), "flat": ("F32", array.reshape(-1))})
        reshard.convert(self.tmp / "large.safetensors", self.tmp / "cut", to="dcp", mesh={"tp": 4}, family="none")
        for path in ("large.safetensors", "cut"):
            with reshard.open(self.tmp / path) as checkpoint:
                t = checkpoint["t"]
                for key in (..., (slice(None), slice(None, None, 2)), slice(5, None, 3), (slice(None, None, 7), slice(9, 2000, 1000)),
                            (slice(None, None, -1), slice(17, 18))):  # fmt: skip
                    self.assert_same(t[key], array[key])
                flat = checkpoint["flat"]
                self.assert_same(flat[::2], array.reshape(-1)[::2])
                self.assert_same(flat[3::50000], array.reshape(-1)[3::50000])

    def test_a_slice_reads_only_what_it_needs(self):
        path = self.tmp / "sparse.safetensors"
        rows, columns = 1 << 16, 4096
        header = json.dumps(
            {"t": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, rows * columns * 4]}}
        ).encode()
        with open(path, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + rows * columns * 4)
        with reshard.open(path) as checkpoint:
            t = checkpoint["t"]
            before = bytes_read()
            self.assertEqual(t[100:164].shape, (64, columns))
            self.assertLess(bytes_read() - before, 1.1 * 64 * columns * 4 + 65536)
            before = bytes_read()
            self.assertEqual(t[::1000, :10].shape, (66, 10))
            self.assertLess(bytes_read() - before, 200_000)

    def test_several_threads_read_one_checkpoint(self):
        expected = raw_safetensors(WHOLE)
        with reshard.open(FSDP) as checkpoint, concurrent.futures.ThreadPoolExecutor(8) as pool:
            for name, array in pool.map(lambda n: (n, checkpoint[n].numpy()), list(expected) * 8):
                self.assert_same(array, expected[name])

    def test_what_numpy_lacks(self):
        narrow = {
            "b": ("BF16", numpy.arange(12, dtype="u2").reshape(3, 4) + 0x3F80),
            "f": ("F8_E4M3", numpy.arange(6, dtype="u1")),
        }
        write_safetensors(self.tmp / "narrow.safetensors", narrow)
        with reshard.open(self.tmp / "narrow.safetensors") as checkpoint:
            self.assertEqual(checkpoint["b"].dtype, "bfloat16")
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                for name, (_, array) in narrow.items():
                    self.assert_same(bits(checkpoint[name].numpy()), array)
            if HAS_ML_DTYPES:
                self.assertEqual(checkpoint["b"].numpy().dtype.name, "bfloat16")
                self.assertEqual(float(checkpoint["b"][0, 0]), 1.0)
                self.assertEqual(numpy.asarray(checkpoint["b"], dtype="f4")[0, 0], 1)
            else:
                self.assertEqual(checkpoint["b"].numpy().dtype, numpy.uint16)
                with self.assertRaises(TypeError):
                    numpy.asarray(checkpoint["b"], dtype="f4")
            if HAS_TORCH:
                import torch

                b = torch.from_dlpack(checkpoint["b"])
                self.assertEqual((b.dtype, b.shape), (torch.bfloat16, (3, 4)))
                self.assert_same(b.view(torch.int16).numpy(), narrow["b"][1].view("i2"))
                self.assertEqual(checkpoint["b"].torch((slice(1), 0)).dtype, torch.bfloat16)
                self.assertEqual(checkpoint["f"].torch().dtype, torch.float8_e4m3fn)

    @unittest.skipIf(HAS_ML_DTYPES, "ml_dtypes is there")
    def test_the_warning_of_bits_is_of_the_line_that_reads(self):
        write_safetensors(self.tmp / "bits.safetensors", {"t": ("F8_E5M2", numpy.zeros(3, "u1"))})
        with reshard.open(self.tmp / "bits.safetensors") as checkpoint, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for read in (lambda: checkpoint["t"].numpy(), lambda: checkpoint["t"][0]):
                reshard._dtypes._told.clear()
                read()
        self.assertEqual([w.filename for w in caught], [__file__] * 2)

    @unittest.skipUnless(HAS_DLPACK, "an older NumPy")
    def test_dlpack(self):
        with reshard.open(WHOLE) as checkpoint:
            tensor = checkpoint["layers.0.w1"]
            self.assertEqual(tensor.__dlpack_device__(), (1, 0))
            array = numpy.from_dlpack(tensor)
            self.assert_same(array, raw_safetensors(WHOLE)["layers.0.w1"])
            tensor.__dlpack__()  # a capsule that is not used frees its tensor
            with self.assertRaises(BufferError):
                tensor.__dlpack__(copy=False)
            with self.assertRaises(BufferError):
                tensor.__dlpack__(dl_device=(2, 0))

    def test_objects_are_told_and_pickles_are_not_executed(self):
        with reshard.open(DATA / "dcp_small/wt") as checkpoint:
            self.assertEqual(checkpoint.objects, {"n.step": "7"})
            self.assertEqual(checkpoint["w"].shape, (2, 3))

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(Reading.tmp / "executed"),)

        import zipfile

        with zipfile.ZipFile(self.tmp / "evil.pt", "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"a": Evil()}, protocol=2))
            archive.writestr("archive/version", "3\n")
        with contextlib.suppress(reshard.Error):
            with reshard.open(self.tmp / "evil.pt") as checkpoint:
                checkpoint.objects
        self.assertFalse((self.tmp / "executed").exists())

    def test_representations(self):
        tensors = {f"<script>{i}": ("F32", numpy.zeros((2, 3), "f4")) for i in range(40)}
        write_safetensors(self.tmp / "many.safetensors", tensors)
        checkpoint = reshard.open(self.tmp / "many.safetensors")
        self.assertLessEqual(len(repr(checkpoint).splitlines()), 24)
        self.assertIn("40 tensors", repr(checkpoint))
        self.assertIn("... and 20 more", repr(checkpoint))
        self.assertIn("float32 [2, 3]", repr(checkpoint["<script>0"]))
        for html in (checkpoint._repr_html_(), checkpoint["<script>0"]._repr_html_()):
            self.assertIn("&lt;script&gt;0", html)
            self.assertNotIn("<script>", html)
        checkpoint.close()
        self.assertIn("closed", repr(checkpoint))
        with self.assertRaises(ValueError):
            checkpoint["<script>0"]


def bytes_read():
    """By this process, whatever from."""
    return int(re.search(r"rchar: (\d+)", pathlib.Path("/proc/self/io").read_text()).group(1))


class Errors(Case):
    def test_a_path_that_is_not_there(self):
        with self.assertRaises(reshard.MissingError) as caught:
            reshard.open(self.tmp / "nowhere")
        self.assertIsInstance(caught.exception, FileNotFoundError)
        self.assertIsInstance(caught.exception, OSError)
        self.assertIsInstance(caught.exception, reshard.Error)
        self.assertEqual(caught.exception.path, str(self.tmp / "nowhere"))
        self.assertEqual((caught.exception.filename, caught.exception.errno), (caught.exception.path, errno.ENOENT))
        self.assertIn("nowhere", str(caught.exception))
        (self.tmp / "steps/step-1000").mkdir(parents=True)
        for call in (reshard.open, reshard.inspect):
            with self.assertRaisesRegex(reshard.MissingError, "not found; did you mean .*/steps/step-1000[?]"):
                call(self.tmp / "steps/step-100")

    def test_a_full_disk_is_not_a_missing_file(self):
        from reshard._errors import of

        out = self.tmp / "out"
        self.assertNotIsInstance(of(5, f"{out}: cannot create: No space left on device"), FileNotFoundError)
        self.assertIsInstance(of(5, f"{out}: cannot open: No such file or directory"), FileNotFoundError)

    def test_a_damaged_file_says_where(self):
        data = bytearray(WHOLE.read_bytes())
        data[8] = 0
        (self.tmp / "damaged.safetensors").write_bytes(data)
        with self.assertRaises(reshard.Error) as caught:
            reshard.open(self.tmp / "damaged.safetensors")
        self.assertEqual(caught.exception.path, str(self.tmp / "damaged.safetensors"))
        self.assertIs(pickle.loads(pickle.dumps(caught.exception)).__class__, caught.exception.__class__)

    def test_a_checksum_that_does_not_hold_is_told_with_tensor_and_offset(self):
        import shutil

        shutil.copytree(DATA / "dcp_small/wt", self.tmp / "wt")
        (file,) = (self.tmp / "wt").glob("*.distcp")
        data = bytearray(file.read_bytes())
        with reshard.open(self.tmp / "wt") as checkpoint:
            piece = checkpoint["w"].pieces[0]
        data[piece.offset] ^= 1
        file.write_bytes(data)
        with reshard.open(self.tmp / "wt") as checkpoint, self.assertRaises(reshard.CorruptError) as caught:
            checkpoint["w"].numpy()
        self.assertEqual((caught.exception.tensor, caught.exception.offset), ("w", piece.offset))
        self.assertEqual(caught.exception.path, str(file))

    def test_data_that_are_cut_short(self):
        (self.tmp / "short.safetensors").write_bytes(WHOLE.read_bytes()[:-4])
        with self.assertRaises(reshard.Error) as caught:
            with reshard.open(self.tmp / "short.safetensors") as checkpoint:
                for tensor in checkpoint.values():
                    tensor.numpy()
        self.assertIn("short.safetensors", caught.exception.path)

    def test_arguments_of_a_wrong_kind_are_named(self):
        out = self.tmp / "out"
        rows = [
            (lambda: reshard.load(WHOLE, rank="1"), TypeError, "rank: expected an integer, got '1'"),
            (lambda: reshard.load(WHOLE, mesh="tp=2", rank=1.0), TypeError, "rank: expected an integer, got 1.0"),
            (lambda: reshard.load(WHOLE, rank=1 << 70), reshard.UsageError, "rank: 1180591620717411303424 is too large"),
            (lambda: reshard.load(WHOLE, mesh=(2, 2)), TypeError, "mesh: expected text such as 'tp=2', a dict or"),
            (lambda: reshard.convert(WHOLE, out, to="dcp", mesh=4), TypeError, "mesh: expected text such as"),
            (lambda: reshard.load(WHOLE, include=[object]), TypeError, "include: expected text, a number or several"),
            (lambda: reshard.load(WHOLE, include={"a": "b"}), TypeError, "include: expected text, a number or several"),
            (lambda: reshard.inspect(WHOLE, part=lambda: 0), TypeError, "part: expected text, a number or several"),
            (lambda: reshard.load(WHOLE, threads=0), reshard.UsageError, "--threads: expected 1 to 1024, got '0'"),
            (lambda: reshard.convert(WHOLE, out, to="hf", threads=-1), reshard.UsageError, "--threads: expected 1 to"),
            (lambda: reshard.diff(WHOLE, WHOLE, tolerance="x"), reshard.UsageError, "--tolerance: expected a number"),
            (lambda: reshard.plan(WHOLE, to="dcp", ranks=0), reshard.UsageError, "--ranks: expected 1 to 1048576, got"),
            (lambda: reshard.open(""), reshard.UsageError, "expected a path, got an empty one"),
            (lambda: reshard.inspect(b""), reshard.UsageError, "expected a path, got an empty one"),
            (lambda: reshard.open(None), TypeError, "expected str, bytes or os.PathLike object, not NoneType"),
        ]
        for call, kind, message in rows:
            with self.subTest(message), self.assertRaises(kind) as caught:
                call()
            self.assertIn(message, str(caught.exception))

    def test_several_names_come_from_whatever_is_iterated(self):
        with reshard.open(WHOLE) as checkpoint:
            first, second = list(checkpoint)[:2]
        for names in ([first, second], (n for n in (first, second)), {first: 1, second: 2}.keys(), map(str, (first, second)),
                      numpy.array([first, second])):  # fmt: skip
            self.assertEqual(set(reshard.load(WHOLE, include=names)), {first, second})

    def test_usage(self):
        with self.assertRaises(reshard.UsageError) as caught:
            reshard.convert(WHOLE, self.tmp / "out", to="nothing")
        self.assertIsInstance(caught.exception, ValueError)
        with self.assertRaises(reshard.UsageError):
            reshard.convert(WHOLE, self.tmp / "out", to="hf", allow="everything")
        with self.assertRaises(TypeError):
            reshard.convert(WHOLE, self.tmp / "out", to="hf", no_such_option=1)


class Views(Case):
    def test_a_view_has_other_names_and_rows(self):
        program(
            "synth", self.tmp / "titan", "--model", "llama3-tiny", "--mesh", "tp=2,dp_shard=2", "--names", "torchtitan"
        )
        reshard.convert(self.tmp / "titan", self.tmp / "hf", to="hf", dtype="keep")
        expected = {}
        for file in (self.tmp / "hf").glob("*.safetensors"):
            expected.update(raw_safetensors(file))
        with reshard.open(self.tmp / "titan") as checkpoint:
            checkpoint["layers.0.attention.wq.weight"].numpy()
            view = checkpoint.view(names="hf")
            self.assertEqual(set(view), set(expected))
            for name, array in expected.items():
                self.assert_same(bits(view[name].numpy()), bits(array))
            name = "model.layers.0.self_attn.q_proj.weight"
            self.assert_same(bits(view[name][3:9, ::2]), bits(expected[name][3:9, ::2]))
            self.assertFalse(
                numpy.array_equal(bits(checkpoint["layers.0.attention.wq.weight"].numpy()), bits(expected[name]))
            )
            self.assertGreater(len(view[name].pieces), 1)
            self.assertIn(str(len(view)), repr(view))
            with self.assertRaises(reshard.Error):
                checkpoint.view(names="nobody's")


class Loading(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        program(
            "synth",
            cls.tmp / "titan",
            "--model",
            "llama3-tiny",
            "--mesh",
            "dp_shard=3",
            "--dtype",
            "float32",
            "--optimizer",
        )

    def test_without_memory_it_makes_arrays(self):
        arrays = reshard.load(FSDP)
        with reshard.open(FSDP) as checkpoint:
            self.assertEqual(set(arrays), set(checkpoint))
            for name, array in arrays.items():
                self.assert_same(array, checkpoint[name].numpy())

    def test_the_parts_of_a_mesh_are_those_of_ranks(self):
        reshard.convert(self.tmp / "titan", self.tmp / "ranks", to="ranks", mesh="tp=2,dp_shard=2", names="keep")
        files = sorted((self.tmp / "ranks").glob("*.safetensors"))
        self.assertEqual(len(files), 4)
        for rank, file in enumerate(files):
            expected = raw_safetensors(file)
            into = {name: numpy.full(a.shape, 7, "f4") for name, a in expected.items()}
            seen = []
            report = reshard.load(self.tmp / "titan", into=into, mesh={"tp": 2, "dp_shard": 2}, rank=rank, part="model",
                                  progress=lambda done, total: seen.append((done, total)))  # fmt: skip
            self.assertEqual(report.tensors, len(expected))
            self.assertEqual(seen[-1][0], report.bytes_read)
            for name, array in expected.items():
                self.assert_same(into[name], array)

    def test_strided_memory_other_names_and_dtypes(self):
        whole = reshard.load(self.tmp / "titan", part="model", names="hf", dtype="float16")
        into = {name: numpy.zeros(tuple(2 * n for n in a.shape), "f2")[tuple(slice(None, None, 2) for _ in a.shape)].T.copy().T
                for name, a in whole.items()}  # fmt: skip
        into = {name: a[::-1][::-1] if a.ndim > 1 else a for name, a in into.items()}
        reshard.load(self.tmp / "titan", into=into, part="model", names="hf", dtype="float16")
        for name, array in whole.items():
            self.assert_same(into[name], array)

    def test_what_does_not_fit_is_said(self):
        model = reshard.load(self.tmp / "titan", part="model")
        name = next(iter(model))
        refused = [
            dict(model, more=numpy.zeros(3, "f4")),
            {k: v for k, v in model.items() if k != name},
            dict(model, **{name: numpy.zeros(3, "f4")}),
            dict(model, **{name: model[name].astype("f8")}),
        ]
        for into in refused:
            with self.assertRaises(reshard.UsageError) as caught:
                reshard.load(self.tmp / "titan", into=into, part="model")
            self.assertIn(caught.exception.tensor, (name, "more"))
        model[name].flags.writeable = False
        with self.assertRaises(reshard.UsageError):
            reshard.load(self.tmp / "titan", into=model, part="model")
        with self.assertRaises(TypeError):
            reshard.load(self.tmp / "titan", into={name: [1, 2]}, part="model")

    def test_a_part_without_the_model_is_no_corrupt_model(self):
        config = self.tmp / "titan/config.json"
        with reshard.open(self.tmp / "titan", part="optimizer") as checkpoint:
            count = len(checkpoint)
        arrays = reshard.load(self.tmp / "titan", part="optimizer", names="hf", config=config)
        self.assertEqual(len(arrays), count)
        self.assertTrue(all(".exp_avg" in n or ".step" in n for n in arrays), arrays.keys())
        done = reshard.convert(self.tmp / "titan", self.tmp / "optimizer", to="dcp", part="optimizer", names="hf")
        self.assertEqual(done.tensors, count)
        self.assertTrue(reshard.verify(self.tmp / "titan", part="optimizer", config=config, fail_on="error").ok)
        with reshard.open(self.tmp / "optimizer") as alone:
            self.assertEqual(len(alone), count)
        with self.assertRaises(reshard.CorruptError):  # a model that is cut is a model, too
            reshard.load(self.tmp / "titan", part="model", names="hf", config=self.more_layers(config))

    def more_layers(self, config):
        path = self.tmp / "more_layers.json"
        path.write_text(json.dumps(dict(json.loads(config.read_text()), num_hidden_layers=9)))
        return path

    def destinations(self):
        """Of each thing that may be true of a buffer: (what it is, how to make one like an array, why it is refused or None)."""
        def strided(a, steps):
            whole = numpy.zeros([n * abs(s) for n, s in zip(a.shape, steps)], a.dtype)
            return whole[tuple(slice(None, None, s) for s in steps)]

        masked = lambda a: numpy.ma.masked_array(a, mask=True)
        readonly = numpy.memmap(self.tmp / "mapped", mode="w+", dtype="f4", shape=(4096,))
        readonly.flush()
        rows = [
            ("plain", lambda a: a, None),
            ("of Fortran's order", lambda a: numpy.asfortranarray(a), None),
            ("with gaps", lambda a: strided(a, (2, 3)), None),
            ("not aligned", lambda a: numpy.zeros(a.nbytes + 1, "u1")[1:].view(a.dtype).reshape(a.shape), None),
            ("of this byte order by name", lambda a: a.astype(a.dtype.newbyteorder("=")), None),
            ("a memory map", lambda a: numpy.memmap(self.tmp / "map", mode="w+", dtype=a.dtype, shape=a.shape), None),
            ("a private map", lambda a: numpy.memmap(self.tmp / "mapped", mode="c", dtype=a.dtype, shape=a.shape), None),
            ("a matrix", lambda a: numpy.asmatrix(a), None),
            ("big-endian", lambda a: a.astype(">f4"), "byte order"),
            ("reversed", lambda a: strided(a, (1, -1)), "negative"),
            ("one element many times", lambda a: numpy.lib.stride_tricks.as_strided(a, a.shape, (0, 4), writeable=True), "no two elements at the same address"),
            ("rows that overlap", lambda a: numpy.lib.stride_tricks.as_strided(a, a.shape, (4, 4), writeable=True), "no two elements at the same address"),
            ("strides of odd bytes", lambda a: numpy.zeros(a.shape, [("x", "f4"), ("y", "u1")])["x"], "strides"),
            ("read-only", lambda a: numpy.frombuffer(bytes(a.nbytes), a.dtype).reshape(a.shape), "written"),
            ("a map that is read-only", lambda a: numpy.memmap(self.tmp / "mapped", mode="r", dtype=a.dtype, shape=a.shape), "written"),
            ("masked", masked, "mask"),
            ("objects", lambda a: a.astype(object), "object"),
            ("records", lambda a: a.view([("f", "f4")]), "dtype"),
            ("dates", lambda a: a.astype("f8").view("M8[s]"), "datetime64"),
            ("other integers", lambda a: a.view("i4"), "int32"),
            ("another shape", lambda a: a.reshape(-1), "shape"),
            ("a tensor of a checkpoint", lambda a: reshard.open(WHOLE)["layers.0.w1"], "read-only"),
            ("a list", lambda a: a.tolist(), "list"),
            ("a scalar", lambda a: a[0, 0], "float32"),
        ]  # fmt: skip
        if not HAS_TORCH:
            return rows
        import torch

        def freed(a):
            t = torch.zeros(a.shape)
            t.untyped_storage().resize_(0)
            return t

        def cut(a):
            t = torch.zeros(a.shape)
            t.untyped_storage().resize_(a.nbytes - 4)
            return t

        class Plain(torch.Tensor):
            pass

        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, shape):
                return torch.Tensor._make_wrapper_subclass(cls, shape)

            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                raise NotImplementedError

        def of_inference(a):
            with torch.inference_mode():
                return torch.zeros(a.shape)

        read_only_map = numpy.memmap(self.tmp / "mapped", mode="r", dtype="f4", shape=(4096,))
        complex_view = lambda a: torch.zeros(a.shape, dtype=torch.complex64).conj().imag
        rows += [
            ("torch", lambda a: torch.zeros(a.shape), None),
            ("a parameter", lambda a: torch.nn.Parameter(torch.zeros(a.shape)), None),
            ("transposed", lambda a: torch.zeros(a.shape[::-1]).T, None),
            ("a view with an offset", lambda a: torch.zeros(a.shape[0] + 2, a.shape[1] + 3)[1:-1, 2:-1], None),
            ("of inference mode", of_inference, None),
            ("a subclass that is a tensor", lambda a: torch.zeros(a.shape).as_subclass(Plain), None),
            ("the real part", lambda a: torch.zeros(a.shape, dtype=torch.complex64).real, None),
            ("DLPack", lambda a: OnlyDlpack(torch.zeros(a.shape)), None),
            ("DLPack of before 1.0", lambda a: OldDlpack(torch.zeros(a.shape)), None),
            ("negated", lambda a: torch._neg_view(torch.zeros(a.shape)), "negative bit"),
            ("an imaginary part of a conjugate", complex_view, "negative bit"),
            ("expanded", lambda a: torch.zeros(1, a.shape[1]).expand(a.shape), "no two elements at the same address"),
            ("freed", freed, "storage"),
            ("cut", cut, "storage"),
            ("meta", lambda a: torch.zeros(a.shape, device="meta"), "meta device"),
            ("sparse", lambda a: torch.zeros(a.shape).to_sparse(), "sparse"),
            ("sparse rows", lambda a: torch.zeros(a.shape).to_sparse_csr(), "sparse"),
            ("quantized", lambda a: torch.quantize_per_tensor(torch.zeros(a.shape), 1.0, 0, torch.quint8), "quantized"),
            ("nested", lambda a: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]), "nested"),
            ("zeros without memory", lambda a: torch._efficientzerotensor(a.shape), "zero tensor"),
            ("a wrapper", lambda a: Wrapper(a.shape), "Wrapper"),
            ("another dtype", lambda a: torch.zeros(a.shape, dtype=torch.float64), "float64"),
            ("a torch view of a read-only map", lambda a: torch.from_numpy(read_only_map)[: a.size].view(a.shape), "mapped"),
            ("DLPack that is read-only", lambda a: FlaggedDlpack(torch.zeros(a.shape), 1), "read-only"),
            ("DLPack of a copy", lambda a: FlaggedDlpack(torch.zeros(a.shape), 2), "copy"),
        ]  # fmt: skip
        return rows

    def test_what_is_true_of_a_buffer_is_heeded_or_refused_with_why(self):
        name = "layers.0.w1"
        expected = raw_safetensors(WHOLE)[name]
        for what, make, why in self.destinations():
            with self.subTest(what), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                into = make(numpy.zeros(expected.shape, "f4"))
                if why is None:
                    reshard.load(WHOLE, into={name: into}, strict=False)
                    got = into.tensor if hasattr(into, "tensor") else into
                    self.assert_same(numpy.asarray(got.detach() if hasattr(got, "detach") else got), expected)
                else:
                    with self.assertRaisesRegex((reshard.UsageError, TypeError), why):
                        reshard.load(WHOLE, into={name: into}, strict=False)

    def test_tensors_of_one_buffer(self):
        """Slices of one buffer are filled; tensors that share elements are refused, unless they are one."""
        whole = raw_safetensors(WHOLE)
        a, b = "layers.0.w1", "layers.0.w2"
        self.assertEqual(len(whole[a].shape), 2)
        rows, columns = whole[a].shape
        for axis in (0, 1):
            fused = numpy.zeros((2 * rows, columns) if axis == 0 else (rows, 2 * columns), "f4")
            halves = numpy.split(fused, 2, axis)
            write_safetensors(self.tmp / "two.safetensors", {"x": ("F32", whole[a]), "y": ("F32", whole[a] + 1)})
            reshard.load(self.tmp / "two.safetensors", into={"x": halves[0], "y": halves[1]})
            self.assert_same(fused, numpy.concatenate([whole[a], whole[a] + 1], axis))
        one = numpy.zeros((rows + 1, columns), "f4")
        with self.assertRaisesRegex(reshard.UsageError, "shares memory with tensor 'x'|shares memory with tensor 'y'"):
            reshard.load(self.tmp / "two.safetensors", into={"x": one[1:], "y": one[:-1]})
        with self.assertRaisesRegex(reshard.UsageError, "different values"):
            reshard.load(self.tmp / "two.safetensors", into={"x": one[1:], "y": one[1:]})
        write_safetensors(self.tmp / "tied.safetensors", {"x": ("F32", whole[a]), "y": ("F32", whole[a])})
        reshard.load(self.tmp / "tied.safetensors", into={"x": one[1:], "y": one[1:]})
        self.assert_same(one[1:], whole[a])

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_autograd_hears_of_a_load(self):
        import torch

        name = "layers.0.w1"
        weight = torch.nn.Parameter(torch.zeros(raw_safetensors(WHOLE)[name].shape))
        loss = (weight * weight).sum()
        reshard.load(WHOLE, into={name: weight}, strict=False)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_not_strict_leaves_the_rest_out(self):
        with reshard.open(self.tmp / "titan") as checkpoint:
            name = "tok_embeddings.weight"
            into = {name: numpy.zeros(checkpoint[name].shape, "f4")}
            report = reshard.load(self.tmp / "titan", into=into, strict=False)
            self.assertEqual((report.tensors, report.bytes_read), (1, into[name].nbytes))
            self.assert_same(into[name], checkpoint[name].numpy())
            for name, how in (("model.embed_tokens.weight", {"names": "hf"}), ("tok_embeddings.weight", {"names": "torchtitan"}),
                              ("model.embed_tokens.weight", {"names": "hf", "part": "model"})):  # fmt: skip
                with self.subTest(how):
                    array = numpy.zeros(checkpoint["tok_embeddings.weight"].shape, "f4")
                    report = reshard.load(self.tmp / "titan", into={name: array}, strict=False, **how)
                    self.assertEqual(report.tensors, 1)
                    self.assertLessEqual(report.bytes_read, sum(t.nbytes for n, t in checkpoint.items() if "optim" not in n))
                    self.assert_same(array, checkpoint["tok_embeddings.weight"].numpy())

    def test_a_name_that_the_checkpoint_lacks_is_named_with_what_helps(self):
        array = numpy.zeros(3, "f4")
        for name, names, hint in (("norm", None, "select the naming convention with names="),
                                  ("model.norm.wieght", "hf", "did you mean 'model.norm.weight'?")):  # fmt: skip
            for strict in (True, False):
                with self.assertRaises(reshard.UsageError) as caught:
                    reshard.load(self.tmp / "titan", into={name: array}, names=names, strict=strict)
                self.assertIn(hint, str(caught.exception))
        for strict in (True, False):
            with self.assertRaisesRegex(reshard.UsageError, "into: has no tensors to fill"):
                reshard.load(self.tmp / "titan", into={}, strict=strict)

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_torch_tensors(self):
        import torch

        whole = reshard.load(self.tmp / "titan", part="model")
        into = {name: torch.nn.Parameter(torch.zeros(a.shape)) for name, a in whole.items()}
        reshard.load(self.tmp / "titan", into=into, part="model")
        for name, array in whole.items():
            self.assert_same(into[name].detach().numpy(), array)
        half = {name: torch.zeros(a.shape, dtype=torch.bfloat16) for name, a in whole.items()}
        reshard.load(self.tmp / "titan", into=half, part="model", dtype="bfloat16")
        for name, array in whole.items():
            self.assertTrue(torch.equal(half[name], torch.from_numpy(array).to(torch.bfloat16)), name)

    @unittest.skipUnless(HAS_DLPACK, "an older NumPy")
    def test_dlpack_destinations(self):
        class Foreign:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self):
                return self.array.__dlpack__()

        whole = reshard.load(FSDP, part="model")
        arrays = {name: numpy.zeros_like(a) for name, a in whole.items()}
        reshard.load(FSDP, into={name: Foreign(a) for name, a in arrays.items()}, part="model")
        for name, array in whole.items():
            self.assert_same(arrays[name], array)


# The program of a rank in Modules.test_fsdp2_and_tensor_parallel_models.
RANK = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import reshard

rank, port, saved = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
dist.init_process_group("gloo")
whole = torch.load(saved)

def model():
    made = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 8), torch.nn.Linear(8, 6), torch.nn.LayerNorm(6))
    return made.to(torch.bfloat16)

for device in ("cpu", "meta"):
    for names in (("dp",), ("tp",)):
        with torch.device(device):
            sharded = model()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        if names == ("tp",):
            parallelize_module(sharded, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            fully_shard(sharded[0], mesh=mesh)
            fully_shard(sharded, mesh=mesh)
        report = reshard.load(saved, into=sharded)
        assert report.bytes_read < sum(t.nbytes for t in whole.values()), report
        for name, tensor in sharded.state_dict().items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(full.view(torch.int16), whole[name].view(torch.int16)), (device, names, name)
        if names == ("dp",):
            plain = model()
            plain.load_state_dict(whole)
            x = torch.ones(2, 6, dtype=torch.bfloat16)
            assert torch.equal(sharded(x), plain(x))
dist.destroy_process_group()
print("equal")
"""


@unittest.skipUnless(HAS_TORCH, "no torch")
class Modules(Case):
    """into= a torch module."""

    def saved(self, module, name):
        import torch

        torch.save(module.state_dict(), self.tmp / name)
        return self.tmp / name

    def assert_loaded(self, module, other):
        import torch

        for (name, a), (_, b) in zip(module.state_dict().items(), other.state_dict().items()):
            self.assertTrue(torch.equal(a, b), name)

    def model(self, dtype=None):
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Embedding(7, 4, dtype=dtype)
                self.norm = torch.nn.BatchNorm1d(4, dtype=dtype)
                self.head = torch.nn.Linear(4, 7, bias=False, dtype=dtype)
                self.head.weight = self.embed.weight
                self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
                self.register_buffer("cache", torch.ones(2), persistent=False)

        return Model()

    def test_a_module_and_one_on_the_meta_device(self):
        import torch

        first = self.model()
        path = self.saved(first, "model.pt")
        report = reshard.load(path, into=(second := self.model()))
        self.assertEqual(report.tensors, len(first.state_dict()))
        self.assert_loaded(second, first)
        with torch.device("meta"):
            third = self.model()
        with self.assertWarnsRegex(UserWarning, "'cache' of the module stay on the meta device"):
            reshard.load(path, into=third)
        self.assert_loaded(third, first)
        self.assertIs(third.head.weight, third.embed.weight)
        self.assertTrue(third.head.weight.requires_grad and not third.frozen.requires_grad)

    def test_a_tied_tensor_that_is_stored_once(self):
        import torch

        first = self.model()
        state = {name: t for name, t in first.state_dict().items() if name != "head.weight"}
        torch.save(state, self.tmp / "once.pt")
        for device in ("cpu", "meta"):
            with torch.device(device):
                second = self.model()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reshard.load(self.tmp / "once.pt", into=second)
            self.assert_loaded(second, first)

    def test_dtypes_as_people_write_them(self):
        import torch

        path = self.saved(self.model(), "wide.pt")
        for dtype in (torch.bfloat16, "bf16", "torch.bfloat16", "bfloat16", "BF16"):
            got = reshard.load(path, framework="torch", dtype=dtype, family="none")
            self.assertEqual(got["embed.weight"].dtype, torch.bfloat16, dtype)
        for dtype in (numpy.float16, numpy.dtype("float16"), "fp16", "half", "F16"):
            self.assertEqual(reshard.load(path, dtype=dtype, family="none")["embed.weight"].dtype, numpy.float16, dtype)
        with self.assertRaisesRegex(reshard.UsageError, "convert while loading with dtype="):
            reshard.load(path, into=self.model(torch.float16))

    def test_new_tensors_of_torch(self):
        import torch

        first = self.model()
        path = self.saved(first, "new.pt")
        for options in ({"framework": "torch"}, {"device": "cpu"}, {"framework": "pt", "device": torch.device("cpu")}):
            second = self.model()
            second.load_state_dict(reshard.load(path, **options))
            self.assert_loaded(second, first)
        for wrong in ({"framework": "jax"}, {"framework": "numpy", "device": "cuda"}, {"framework": "torch", "into": {}}):
            with self.assertRaises(reshard.UsageError):
                reshard.load(path, **wrong)

    def test_what_safe_open_has(self):
        import torch

        first = self.model()
        with reshard.open(self.saved(first, "open.pt"), framework="pt", device="cpu") as f:
            self.assertEqual(sorted(f.keys()), sorted(first.state_dict()))
            self.assertTrue(torch.equal(f.get_tensor("embed.weight"), first.embed.weight))
            part = f.get_slice("embed.weight")
            self.assertEqual((part.get_shape(), part.get_dtype()), ([7, 4], "F32"))
            self.assertTrue(torch.equal(part[2:5, ::2], first.embed.weight[2:5, ::2]))
            self.assertEqual(f.metadata(), {})
            for get in (f.get_tensor, f.get_slice):
                with self.assertRaisesRegex(KeyError, "open.pt: no tensor 'embed.wieght'; did you mean 'embed.weight'?"):
                    get("embed.wieght")
        program("synth", self.tmp / "st", "--model", "llama3-tiny", "--to", "hf", "--layers", "1")
        with reshard.open(self.tmp / "st") as f:
            self.assert_same(bits(f.get_tensor("model.norm.weight")), bits(f["model.norm.weight"].numpy()))

    def test_it_answers_as_safe_open_does(self):
        import torch

        try:
            from safetensors import safe_open
        except ImportError:
            self.skipTest("no safetensors")
        path = self.tmp / "answers"
        program("synth", path, "--model", "llama3-tiny", "--to", "hf", "--layers", "1")
        theirs = safe_open(path / "model.safetensors", "pt")
        indices = (..., 0, -1, (slice(None), 3), slice(2, 50, 7), (0, 0), (..., 5), (3, ...), None, (slice(None), None), [1, 2, 3],
                   (slice(None), [0, 5]), torch.tensor([4, 1]), torch.tensor(3), numpy.array([0, 2]), numpy.int64(7), True,
                   slice(0, 0), slice(5, 2), slice(-3, None), slice(0, 10**9), [True] * 512, 512, (0, 0, 0), "a", 1.5)  # fmt: skip
        for place in (path, path / "model.safetensors"):
            ours = reshard.open(place, framework="pt")
            self.assertEqual((list(ours.keys()), ours.keys()[0], ours.keys()[-2:]), (theirs.keys(), theirs.keys()[0], theirs.keys()[-2:]))
            self.assertEqual(ours.metadata(), theirs.metadata())
            a, b = ours.get_slice("lm_head.weight"), theirs.get_slice("lm_head.weight")
            self.assertEqual((a.get_shape(), a.get_dtype()), (b.get_shape(), b.get_dtype()))
            for index in indices:
                with self.subTest(index=str(index)[:40]), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        expected = b[index]
                    except (IndexError, TypeError) as e:
                        with self.assertRaises(type(e)):
                            a[index]
                    else:
                        self.assertTrue(torch.equal(a[index], expected))

    def test_devices_that_are_not_there(self):
        import torch

        path = self.saved(self.model(), "devices.pt")
        for call in (reshard.open, reshard.load):
            for wrong in ("gpu", -1, "cuda:x", 1.5):
                with self.assertRaisesRegex(reshard.UsageError, "device: expected 'cpu' or 'cuda:0'"):
                    call(path, device=wrong)
            for missing in ("cuda", 0, torch.device("cuda"), f"cuda:{torch.cuda.device_count()}"):
                if torch.cuda.is_available() and not str(missing)[5:]:
                    continue
                with self.assertRaisesRegex(reshard.UnsupportedError, "device: cuda.*GPU"):
                    call(path, device=missing)

    def test_workers_of_a_data_loader_open_it_again(self):
        import multiprocessing

        path = self.tmp / "workers"
        program("synth", path, "--model", "llama3-tiny", "--layers", "1", "--mesh", "tp=2")
        first = reshard.open(path, part="model")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for given in (first, first.view(names="hf"), first.view(names="hf")["model.norm.weight"]):
                self.assertEqual(pool.apply(_shape_of_norm, (given,)), (128,))
        self.assertEqual(copy.deepcopy(first).keys(), first.keys())
        self.assertTrue(first == first and first != reshard.open(path) and len({first, first}) == 1)
        first.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            copy.deepcopy(first)

    def test_what_a_torch_tensor_has_and_a_lazy_one_has_not(self):
        lazy = reshard.open(self.saved(self.model(), "lazy.pt"))["embed.weight"]
        for name in ("to", "float", "numel", "cuda"):
            with self.assertRaisesRegex(AttributeError, f"no attribute '{name}'; it is lazy: t.torch\\(\\)"):
                getattr(lazy, name)
        self.assertFalse(hasattr(lazy, "__cuda_array_interface__"))

    def test_a_mesh_of_torch(self):
        class Mesh:  # has the members of torch's DeviceMesh
            def __init__(self, names, sizes, at):
                self.mesh_dim_names, self.mesh, self.at = names, numpy.zeros(sizes), at

            def get_coordinate(self):
                return self.at

        program("synth", self.tmp / "m", "--model", "llama3-tiny", "--to", "hf", "--layers", "1")
        for names, at, rank in ((("dp", "tp"), [1, 0], 2), (("tp", "fsdp"), [1, 0], 1), (("dp_shard", "tp"), [1, 1], 3)):
            got = reshard.load(self.tmp / "m", mesh=Mesh(names, (2, 2), at))
            for name, array in reshard.load(self.tmp / "m", mesh="dp_shard=2,tp=2", rank=rank).items():
                self.assert_same(bits(got[name]), bits(array))
        for names in (("dp", "fsdp"), ("a", "b"), None):
            with self.assertRaises(reshard.UsageError):
                reshard.load(self.tmp / "m", mesh=Mesh(names, (2, 2), [0, 0]))

    def test_fsdp2_and_tensor_parallel_models(self):
        import socket

        import torch

        if not hasattr(__import__("torch.distributed.fsdp").distributed.fsdp, "fully_shard"):
            self.skipTest("no fully_shard")
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 8), torch.nn.Linear(8, 6), torch.nn.LayerNorm(6))
        path = self.saved(model.to(torch.bfloat16), "ranks.pt")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        ranks = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", RANK, str(rank), port, path], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for rank in range(2)]  # fmt: skip
        for rank in ranks:
            out, err = rank.communicate(timeout=180)
            self.assertEqual(out.strip().splitlines()[-1:], ["equal"], err)


def _shape_of_norm(given):
    """Reads a norm in another process: of a checkpoint under either convention, or the tensor itself."""
    if isinstance(given, reshard.Tensor):
        return given.numpy().shape
    name = next(n for n in given if n.endswith("norm.weight") and "layers" not in n)
    return tuple(given.get_tensor(name).shape)


class Served(Case):
    """Checkpoints for loaders that take them as they are: reshard.vllm, reshard.transformers."""

    def setUp(self):
        self.saved = self.tmp / "saved"
        if not self.saved.exists():
            program("synth", self.saved, "--model", "llama3-tiny", "--to", "dcp", "--names", "torchtitan", "--mesh", "tp=2")
            program("convert", self.saved, self.tmp / "model", "--to", "hf", "--names", "hf")

    def test_a_stream_has_the_tensors_of_the_converted_model(self):
        from reshard._stream import stream

        expected = reshard.load(self.tmp / "model")
        for chunk_bytes in (1, 1 << 16, 1 << 30):  # each layer, some layers, all layers at once
            names = []
            for name, tensor in stream(self.saved, chunk_bytes=chunk_bytes):
                names.append(name)
                self.assertTrue((bits(tensor) == bits(expected[name])).all(), name)
            self.assertEqual(sorted(names), sorted(expected))

    def test_a_stream_that_lacks_a_tensor_fails_at_its_end(self):
        import reshard._stream

        def without_norm(*args, **options):
            return {name: array for name, array in reshard.load(*args, **options).items() if name != "model.norm.weight"}

        with unittest.mock.patch("reshard._stream.load", without_norm):
            with self.assertRaisesRegex(reshard.CorruptError, "do not make tensor 'model.norm.weight'"):
                list(reshard._stream.stream(self.saved))

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_vllm_is_given_all_tensors(self):
        """By stand-ins of what vLLM 0.32 calls; tests/interop/vllm_serve.py runs vLLM itself."""
        import reshard.vllm

        formats, engines = {}, {}

        class Engine:
            def __init__(self):
                self.model, self.model_config = Model(), config

            def parse_update_info(self, info):
                return self.update_info_cls(**info)

        class Factory:
            _registry = engines

            @staticmethod
            def register_engine(name, module, attribute):
                engines[name] = getattr(sys.modules[module], attribute)

        class Model:
            def load_weights(self, tensors):
                self.loaded = dict(tensors)

        def package(name, **members):
            module = types.ModuleType(name)
            vars(module).update(members)
            return {name: module}

        class DefaultModelLoader:
            def __init__(self, load_config):
                self.extra = load_config.model_loader_extra_config

            def load_weights(self, model, model_config):
                model.load_weights(self.get_all_weights(model_config, model))

        class Logger:
            def info(self, text, *values):
                said.append(text % values)

        said = []
        base = types.SimpleNamespace(WeightTransferInitInfo=object, WeightTransferUpdateInfo=object, WeightTransferEngine=Engine)
        nothing = dict.fromkeys(("initialize_layerwise_reload", "finalize_layerwise_reload"), lambda *_: None)
        modules = {
            **package("vllm"), **package("vllm.logger", init_logger=lambda name: Logger()), **package("vllm.distributed"), **package("vllm.distributed.weight_transfer", base=base),
            **package("vllm.distributed.weight_transfer.factory", WeightTransferEngineFactory=Factory),
            **package("vllm.model_executor"), **package("vllm.model_executor.model_loader.reload", **nothing),
            **package("vllm.model_executor.model_loader", register_model_loader=lambda name: lambda kind: formats.update({name: kind})),
            **package("vllm.model_executor.model_loader.default_loader", DefaultModelLoader=DefaultModelLoader),
        }  # fmt: skip
        config = types.SimpleNamespace(model=str(self.tmp / "model"))
        expected = reshard.load(self.tmp / "model", framework="torch")

        def check(loaded):
            self.assertEqual(loaded.keys(), expected.keys())
            self.assertTrue(all(loaded[name].equal(tensor) for name, tensor in expected.items()))

        with unittest.mock.patch.dict(sys.modules, modules):
            for _ in range(2):  # vLLM may call it again in one process
                reshard.vllm.register()
            extra = {"source": str(self.saved), "chunk_bytes": 1, "num_threads": 2}
            loader = formats["reshard"](types.SimpleNamespace(model_loader_extra_config=extra))
            self.assertEqual(loader.extra, {"num_threads": 2})
            model = Model()
            loader.load_weights(model, config)
            self.assertEqual(said, [f"reshard read 0.000000 GB of {self.saved}"])  # a lazy tensor is read when it is used
            check(model.loaded)
            with self.assertRaisesRegex(ValueError, "source"):
                formats["reshard"](types.SimpleNamespace(model_loader_extra_config={}))
            engine = engines["reshard"]()
            engine.init_transfer_engine(engine.init_info_cls())
            engine.start_weight_update()
            engine.update_weights({"source": str(self.saved), "options": {"chunk_bytes": 1 << 16}})
            engine.finish_weight_update()
            check(engine.model.loaded)

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_lazy_tensors_are_like_tensors_in_memory(self):
        """Chains of random operations on both."""
        import torch

        import reshard._lazy

        torch.manual_seed(0)
        shapes = {"bfloat16": (12, 10), "float32": (4, 6, 8), "float64": (24,), "int64": (), "uint8": (6, 4), "float16": (2, 3, 4, 5),
                  "bool": (0, 4), "float8_e4m3fn": (8, 8)}  # fmt: skip
        kept = {name: (torch.randn(shape) * 9).to(getattr(torch, name)) for name, shape in shapes.items()}
        torch_save = self.tmp / "kept.pt"
        torch.save(kept, torch_save)

        def operations(chance, t):
            """Yields functions of a tensor that suit a tensor like t."""
            yield lambda x: x.reshape(-1)
            yield lambda x: x.unsqueeze(0)
            yield lambda x: x[None]
            yield lambda x: x.contiguous()
            yield lambda x: x.detach().data
            yield lambda x: x.to(torch.float32)
            yield lambda x: x.mul_(2) if x.dtype.is_floating_point and x.element_size() > 1 else x
            yield lambda x: copy.deepcopy(x)
            if t.dim() == 0:
                return
            dim = chance.randrange(-t.dim(), t.dim())
            start = chance.randrange(t.shape[dim] + 1)
            length = chance.randrange(t.shape[dim] - start + 1)
            order = chance.sample(range(t.dim()), t.dim())
            pieces = chance.randint(1, 4)
            yield lambda x: x.narrow(dim, start, length)
            yield lambda x: x[..., start:]
            yield lambda x: x[start - t.shape[0]:start + length]
            yield lambda x: x[::2]
            yield lambda x: x.permute(order)
            yield lambda x: x.transpose(dim, 0)
            yield lambda x: x.chunk(pieces, dim)[0]
            yield lambda x: x.chunk(pieces, dim)[-1]
            yield lambda x: x.split(max(1, length), dim)[-1]
            if t.dim() == 2:
                yield lambda x: x.t()
            if t.shape[dim]:
                yield lambda x: x.select(dim, start - t.shape[dim]) if start < t.shape[dim] else x
                yield lambda x: x.index_select(dim, torch.tensor([0, t.shape[dim] - 1]))

        def same(got, expected):
            flat = [torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8) for t in (got, expected)]
            return got.shape == expected.shape and got.dtype == expected.dtype and flat[0].equal(flat[1])

        still_lazy = 0
        with reshard.open(torch_save) as checkpoint, unittest.mock.patch.object(reshard._lazy, "_COPIED", 64):
            for seed in range(600):
                chance = random.Random(seed)
                name = chance.choice(sorted(shapes))
                lazy, real = reshard._lazy.lazy_tensor(checkpoint[name]), kept[name].clone()
                for _ in range(chance.randint(1, 5)):
                    operation = chance.choice(list(operations(chance, real)))
                    lazy, real = operation(lazy), operation(real)
                still_lazy += isinstance(lazy, reshard._lazy.LazyTensor)
                self.assertTrue(same(lazy, real), seed)
                for dtype in (real.dtype, torch.float64):  # copy_() in one read and in pieces, into rows and into columns
                    for made in (torch.zeros(real.shape), torch.zeros(real.shape[::-1]).permute(list(range(real.dim()))[::-1])):
                        made = made.to(dtype)
                        self.assertTrue(same(made.clone().copy_(lazy), made.clone().copy_(real)), seed)
        self.assertGreater(still_lazy, 100)

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_what_is_not_used_of_a_lazy_stream_is_not_read(self):
        import torch

        from reshard._stream import lazy_stream

        config = self.tmp / "model/config.json"
        expected = reshard.load(self.tmp / "model", framework="torch")
        rank, ranks = 1, 2
        for source in (self.saved, self.tmp / "model"):
            read, whole = [], 0
            for name, tensor in lazy_stream(source, config=config, count=read.append):
                dim = 1 if tensor.dim() > 1 and ("o_proj" in name or "down_proj" in name) else 0
                n = tensor.shape[dim] // ranks if tensor.dim() > 1 else tensor.shape[0]
                start = rank * n if tensor.dim() > 1 else 0
                parameter = torch.nn.Parameter(torch.zeros(expected[name].narrow(dim, start, n).shape, dtype=tensor.dtype))
                parameter.data.copy_(tensor.narrow(dim, start, n))
                self.assertTrue(parameter.data.equal(expected[name].narrow(dim, start, n)), name)
                whole += parameter.nbytes
            self.assertEqual(sum(read), whole)
            self.assertLess(sum(read), 0.51 * sum(t.nbytes for t in expected.values()))
        read = []
        computed = dict(lazy_stream(self.saved, config=config, dtype="float32", count=read.append))  # as stream() does it
        self.assertTrue(all(computed[name].equal(t.float()) for name, t in expected.items()))
        self.assertEqual(sum(read), 2 * sum(t.nbytes for t in expected.values()))

    @unittest.skipUnless(HAS_TORCH, "no torch")
    def test_a_lazy_stream_leaves_out_what_is_tied_and_only_that(self):
        import torch

        from reshard._stream import lazy_stream

        state = dict(reshard.load(self.tmp / "model", framework="torch"))
        config = json.loads((self.tmp / "model/config.json").read_text()) | {"tie_word_embeddings": True}
        path = self.tmp / "tied/config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        torch.save(state, self.tmp / "head.pt")
        torch.save(state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, self.tmp / "tied.pt")
        streamed = dict(lazy_stream(self.tmp / "tied.pt", config=path))
        self.assertEqual(streamed.keys(), reshard.load(self.tmp / "tied.pt", names="hf", config=path).keys())
        self.assertNotIn("lm_head.weight", streamed)
        with self.assertRaisesRegex(reshard.CorruptError, "lm_head.weight"):
            dict(lazy_stream(self.tmp / "head.pt", config=path))

    @unittest.skipUnless(HAS_TORCH and importlib.util.find_spec("transformers"), "no transformers")
    def test_transformers_makes_the_model(self):
        import torch

        import reshard.transformers

        model = reshard.transformers.load(self.saved, config=self.tmp / "model/config.json")
        expected = reshard.load(self.tmp / "model", framework="torch")
        state = model.state_dict()
        self.assertEqual(set(state), set(expected))
        self.assertTrue(all(torch.equal(state[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items()))

    @unittest.skipUnless(HAS_TORCH and importlib.util.find_spec("transformers"), "no transformers")
    def test_transformers_makes_models_of_types_without_a_family(self):
        """An encoder-decoder with tied embeddings and a vision model, below prefixes of trainers and wrappers."""
        import torch
        import transformers

        import reshard.transformers

        small = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
        models = (
            transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)),
            transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, **small)),
        )
        known = {t for family in reshard.families() for t in family.model_types}
        for model in models:
            self.assertNotIn(model.config.model_type, known)
            directory = self.tmp / model.config.model_type
            model.save_pretrained(directory)
            expected = model.state_dict()
            for prefix in ("", "module.", "model._orig_mod."):
                saved = directory / "saved.pt"
                torch.save({"model": {prefix + name: tensor for name, tensor in expected.items()}, "step": 3}, saved)
                state = reshard.transformers.load(saved, config=directory).state_dict()
                self.assertEqual(set(state), set(expected))
                self.assertTrue(all(torch.equal(state[n], t) for n, t in expected.items()), prefix)
            gone = next(name for name in expected if name.endswith("layernorm_before.weight") or name.endswith("layer_norm.weight"))
            torch.save({"model": {name: tensor for name, tensor in expected.items() if name != gone}}, saved)
            with self.assertRaisesRegex(reshard.CorruptError, re.escape(gone)):
                reshard.transformers.load(saved, config=directory)


class Stored(Case):
    """Checkpoints in a bucket."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        bucket = cls.tmp / "served/bucket"
        program("synth", cls.tmp / "titan", "--model", "llama3-tiny", "--mesh", "tp=2", "--dtype", "float32")
        for name, source in {"titan": cls.tmp / "titan", "fsdp": FSDP}.items():
            shutil.copytree(source, bucket / f"run a+b/{name}")
        server = subprocess.Popen(
            [sys.executable, ROOT / "tests/storage/stand_in.py", cls.tmp / "served", "--key", "id:s3cr3t"],
            stdout=subprocess.PIPE, text=True)  # fmt: skip
        cls.addClassCleanup(server.stdout.close)
        cls.addClassCleanup(server.wait)
        cls.addClassCleanup(server.kill)
        store = unittest.mock.patch.dict(os.environ, {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{int(server.stdout.readline())}", "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "s3cr3t", "AWS_EC2_METADATA_DISABLED": "true"})  # fmt: skip
        store.start()
        cls.addClassCleanup(store.stop)

    def test_a_checkpoint_is_opened_and_sliced(self):
        with reshard.open(FSDP) as here, reshard.open("s3://bucket/run a+b/fsdp") as there:
            self.assertEqual(list(there), list(here))
            self.assertEqual(there.mesh, here.mesh)
            for name, tensor in here.items():
                self.assert_same(there[name].numpy(), tensor.numpy())
                if tensor.shape and tensor.shape[0] > 1:
                    self.assert_same(there[name][1:], tensor[1:])

    def test_each_rank_loads_its_part(self):
        for rank in range(4):
            how = {"mesh": "tp=2,dp_shard=2", "rank": rank}
            wanted, got = (reshard.load(root, **how) for root in (self.tmp / "titan", "s3://bucket/run a+b/titan"))
            self.assertEqual(set(got), set(wanted))
            for name, array in wanted.items():
                self.assert_same(got[name], array)

    def test_commands_read_and_write_it(self):
        reshard.convert("s3://bucket/run a+b/titan", "s3://bucket/hf", to="hf")
        self.assertTrue(reshard.verify("s3://bucket/hf", against=self.tmp / "titan"))
        self.assertTrue(reshard.diff("s3://bucket/hf", "s3://bucket/run a+b/titan").equal)
        with self.assertRaisesRegex(OSError, "not found"):
            reshard.open("s3://bucket/nothing")
        with unittest.mock.patch.dict(os.environ, AWS_SECRET_ACCESS_KEY="wrong"):
            refused = program("inspect", "s3://bucket/hf", code=5)
        self.assertIn("the secret key does not match the access key", refused)


class Commands(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        program("synth", cls.tmp / "titan", "--model", "llama3-tiny", "--mesh", "tp=2,dp_shard=2", "--dtype", "float32")
        cls.config = cls.tmp / "titan/config.json"

    def test_convert_plan_verify_diff(self):
        planned = reshard.plan(self.tmp / "titan", to="hf", dtype="bfloat16")
        ticks = []
        done = reshard.convert(self.tmp / "titan", self.tmp / "hf", to="hf", dtype="bfloat16", keep_dtype=["*norm*"],
                               progress=lambda n, total: ticks.append((n, total)))  # fmt: skip
        self.assertEqual((done.tensors, done.bytes_read), (planned.tensors, planned.bytes_read))
        self.assertEqual(ticks[-1], (done.bytes_read, done.bytes_read))
        self.assertGreater(done.checksums, 0)
        self.assertEqual(done.destination, str(self.tmp / "hf"))
        self.assertIn("dcp -> hf", repr(done))
        with reshard.open(self.tmp / "hf") as model:
            self.assertEqual(model["model.layers.0.self_attn.q_proj.weight"].dtype, "bfloat16")
            self.assertEqual(model["model.norm.weight"].dtype, "float32")
        self.assertTrue(reshard.verify(self.tmp / "hf", fail_on="error").ok)
        report = reshard.verify(
            self.tmp / "titan", against=self.tmp / "hf", values=True, progress=lambda n, total: None
        )
        self.assertTrue(report.ok, report)
        self.assertTrue(report)
        self.assertTrue(all(t["equal"] for t in report.tensors if "equal" in t))
        self.assertGreater(len(report.checks), 3)
        difference = reshard.diff(self.tmp / "titan", self.tmp / "hf", tolerance=0.1)
        self.assertTrue(difference.equal, difference)
        self.assertFalse(reshard.diff(self.tmp / "titan", self.tmp / "hf").equal)
        self.assertIn("not equal", repr(reshard.diff(self.tmp / "titan", self.tmp / "hf")))

    def test_dry_run_force_and_view(self):
        self.assertIsInstance(
            reshard.convert(self.tmp / "titan", self.tmp / "dry", to="hf", dry_run=True), reshard.ConversionPlan
        )
        self.assertFalse((self.tmp / "dry").exists())
        for force in (False, True):
            reshard.convert(self.tmp / "titan", self.tmp / "twice", to="dcp", force=force)
        with self.assertRaises(reshard.UsageError):
            reshard.convert(self.tmp / "titan", self.tmp / "twice", to="dcp")
        shown = reshard.convert(self.tmp / "titan", self.tmp / "look.h5", to="hdf5-view", names="hf")
        self.assertGreater(shown.tensors, 10)
        with reshard.open(self.tmp / "titan") as checkpoint:
            reshard.convert(self.tmp / "titan", self.tmp / "a.h5", to="hdf5", codec="zstd:1", shuffle=False)
            with reshard.open(self.tmp / "a.h5") as archive:
                for name, tensor in checkpoint.items():
                    self.assert_same(archive[name].numpy(), tensor.numpy())

    def test_findings_are_not_exceptions(self):
        program(
            "synth", self.tmp / "less", "--model", "llama3-tiny", "--to", "hf", "--without", "*layers.0.mlp.up_proj*"
        )
        report = reshard.verify(self.tmp / "less", config=self.tmp / "less/config.json")
        self.assertFalse(report.ok)
        finding = report.findings[0]
        self.assertEqual(finding.severity, "error")
        self.assertIn("model.layers.0.mlp.up_proj.weight", [t for f in report.findings for t in f.tensors])
        self.assertIn("not ok", repr(report))
        self.assertIn("<li>", report._repr_html_())
        with self.assertRaises(dataclasses.FrozenInstanceError):
            finding.severity = "note"

    def test_values_count_exponents(self):
        expected = raw_safetensors(WHOLE)
        tensors = {t["name"]: t for t in reshard.verify(WHOLE, values=True).tensors}
        self.assertEqual(set(tensors), set(expected))
        for name, array in expected.items():
            exponents = numpy.frexp(array[array != 0].astype("f8"))[1] - 1
            counted = tensors[name]["exponents"]
            self.assertEqual(array.dtype.kind, "f")
            self.assertEqual(counted["first"], exponents.min())
            self.assertEqual(counted["counts"], numpy.bincount(exponents - exponents.min()).tolist(), name)

    def test_check(self):
        report = reshard.check(config=self.config, mesh="tp=2,dp=2", world=4)
        self.assertTrue(report.ok, report)
        self.assertEqual((report.mesh["tp"], report.mesh["dp_shard"], report.mesh_ranks), (2, 2, 4))
        self.assertGreater(report.largest.total, report.largest.weights)
        self.assertFalse(reshard.check(self.config, mesh="tp=2", world=4).ok)

    def test_inspect(self):
        seen = reshard.inspect(self.tmp / "titan", shards=True)
        self.assertTrue(seen.complete)
        self.assertEqual({a["name"]: a["size"] for a in seen.mesh["axes"]}["tp"], 2)
        self.assertEqual(len(seen.tensors), len(reshard.open(self.tmp / "titan")))
        self.assertIn("complete", repr(seen))
        self.assertEqual(len(reshard.inspect(self.tmp / "titan", filter="layers.0.*").tensors), 9)

    def test_the_options_are_those_of_the_command_line(self):
        for name in ("convert", "plan", "verify", "check", "diff", "inspect"):
            text = program(name, "--help")
            flags = set(
                re.findall(
                    r"(?<![\w-])--([a-z][a-z0-9-]*)",
                    text.split("Examples:")[0].split("OPTIONS")[-1].split("Options:")[-1],
                )
            )
            ours = {p.replace("_", "-") for p in inspect.signature(getattr(reshard, name)).parameters}
            flags = {f for f in flags if re.search(rf"^ +(-\w,)?-?-?.*--{f}\b", text, re.M)}
            spoken = {"help", "json", "quiet", "no-shuffle", "limit", "rank-timeout", "no-sandbox"}
            options = {
                m
                for line in text.splitlines()
                if re.match(r"^ +-", line)
                for m in re.findall(r"--([a-z][a-z0-9-]*)", line.split("  ")[1] if line.startswith("  ") else line)
            }
            self.assertLessEqual(options - spoken, ours, name)
            self.assertLessEqual(ours - {"src", "dst", "path", "a", "b", "progress"}, options | flags, name)


class Process(Case):
    """What holds in the process that reshard is in."""

    def setUp(self):
        super().setUp()
        # Tests that run in the background ignore SIGINT, and so do the processes that they start.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))

    def python(self, code, **more):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **more)

    def test_a_device_has_one_limit_in_a_process(self):
        program("synth", self.tmp / "limited", "--model", "llama3-tiny", "--to", "hf")
        code = """
import sys, reshard
convert = lambda out, limit: reshard.convert(sys.argv[1], sys.argv[1] + out, to="hf", device="auto", gpu_memory=limit)
convert("-a", "1GiB"), convert("-b", "1GiB"), convert("-c", None)
try:
    convert("-d", "2GiB")
except reshard.UsageError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", code, self.tmp / "limited"], capture_output=True, text=True, timeout=60)
        self.assertIn("already, got 2147483648; use one value in a process", done.stdout, done.stderr)

    def test_import_is_quick_and_imports_nothing_else(self):
        done = self.python(
            "import sys; before = set(sys.modules); import reshard; print(sorted(m.split('.')[0] for m in set(sys.modules) - before))"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertFalse(
            {"torch", "tqdm", "ml_dtypes", "dataclasses"} & set(re.findall(r"\w+", done.stdout)), done.stdout
        )

    def test_ctrl_c_ends_a_long_call(self):
        program("synth", self.tmp / "big", "--model", "llama3-8b", "--headers-only")
        begun = "def told(done, total):\n    if done > 0: print('begun', flush=True)\n"
        code = (
            f"import reshard\n{begun}reshard.verify({str(self.tmp / 'big')!r}, bytes=True, threads=1, progress=told)\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.assertEqual(child.stdout.readline(), "begun\n")
        child.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, err = child.communicate(timeout=30)
        self.assertIn("KeyboardInterrupt", err)
        self.assertEqual(child.returncode, -signal.SIGINT)
        self.assertLess(time.monotonic() - begin, 20)

    def test_ctrl_c_leaves_no_output(self):
        program("synth", self.tmp / "source", "--model", "llama3-tiny")
        with self.assertRaises(KeyboardInterrupt):
            reshard.convert(
                self.tmp / "source",
                self.tmp / "output",
                to="hf",
                progress=lambda *_: signal.raise_signal(signal.SIGINT),
            )
        # The work may be complete by then; otherwise no part of it is left.
        self.assertFalse((self.tmp / "output.partial").exists())
        with self.assertRaises(KeyboardInterrupt):
            reshard.load(self.tmp / "source", progress=lambda *_: signal.raise_signal(signal.SIGINT))
        self.assertTrue(reshard.load(self.tmp / "source"))

    def test_an_exception_of_a_callback_ends_the_call(self):
        program("synth", self.tmp / "small", "--model", "llama3-tiny")

        def stop(done, total):
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            reshard.convert(self.tmp / "small", self.tmp / "none", to="hf", progress=stop)

    def test_other_threads_go_on(self):
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            write_safetensors(file.name, {"t": ("U8", numpy.zeros(256 << 20, "u1"))})
            ticks, stop = [], threading.Event()

            def tick():
                while not stop.is_set():
                    ticks.append(time.monotonic())
                    time.sleep(0.001)

            thread = threading.Thread(target=tick)
            thread.start()
            begin = time.monotonic()
            reshard.open(file.name)["t"].numpy()
            end = time.monotonic()
            stop.set()
            thread.join()
            during = [t for t in ticks if begin < t < end]
            self.assertGreater(len(during), 3)

    def test_progress_shows_a_bar_or_lines(self):
        program("synth", self.tmp / "bar", "--model", "llama3-tiny")
        with contextlib.redirect_stderr(io.StringIO()) as err:
            reshard.verify(self.tmp / "bar", progress=True)
        if importlib.util.find_spec("tqdm"):
            self.assertRegex(err.getvalue(), r"verify: 100%.*B/s")
        else:
            self.assertEqual(err.getvalue(), "")  # a line every ten seconds

    def test_the_program(self):
        self.assertIn(reshard.__version__, program("--version"))
        self.assertIn("tensor", program("inspect", WHOLE))
        self.assertIn("error", program("inspect", "/nowhere", code=5))
        program("no-such-command", code=2)

    def test_it_is_as_installed(self):
        """With RESHARD_INSTALLED: from a wheel, with nothing of the checkout and no compiler in reach."""
        if not os.environ.get("RESHARD_INSTALLED"):
            self.skipTest("not from a wheel")
        self.assertIn("site-packages", reshard.__file__)
        self.assertTrue(os.access(pathlib.Path(sys.executable).parent / "reshard", os.X_OK))
        for name in ("py.typed", "__init__.pyi"):
            self.assertTrue((pathlib.Path(reshard.__file__).parent / name).exists(), name)


class Stubs(Case):
    def test_stubs_say_what_is_there(self):
        stub = ast.parse((pathlib.Path(reshard.__file__).parent / "__init__.pyi").read_text())
        functions = {n.name: n for n in stub.body if isinstance(n, ast.FunctionDef)}
        classes = {n.name: n for n in stub.body if isinstance(n, ast.ClassDef)}
        self.assertEqual(set(functions) | set(classes), set(reshard.__all__))

        def parameters(node):
            a = node.args
            return [x.arg for x in [*a.posonlyargs, *a.args]], [x.arg for x in a.kwonlyargs]

        def real(function):
            every = inspect.signature(function).parameters.values()
            return (
                [p.name for p in every if p.kind is not p.KEYWORD_ONLY],
                [p.name for p in every if p.kind is p.KEYWORD_ONLY],
            )

        for name, node in functions.items():
            self.assertEqual(parameters(node), real(getattr(reshard, name)), name)
            self.assertTrue(inspect.getdoc(getattr(reshard, name)), name)
        for name, node in classes.items():
            self.assertTrue(inspect.getdoc(getattr(reshard, name)), name)
            kind = getattr(reshard, name)
            members = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            members |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
            have = set(dir(kind)) | set(getattr(kind, "__dataclass_fields__", ())) | {"path", "name", "message"}
            self.assertLessEqual(members, have, name)
            public = {m for m in vars(kind) if not m.startswith("_")}
            self.assertLessEqual(public - members - {"message"}, {m for b in kind.__mro__[1:] for m in vars(b)}, name)
            for method in (n for n in node.body if isinstance(n, ast.FunctionDef) and not n.decorator_list):
                if inspect.isfunction(vars(kind).get(method.name)) and not method.name.startswith("__"):
                    self.assertEqual(parameters(method), real(vars(kind)[method.name]), f"{name}.{method.name}")


    @unittest.skipUnless(HAS_MYPY, "no mypy")
    def test_a_type_checker_takes_them(self):
        right = """
import pathlib
import numpy, reshard
from numpy.typing import NDArray
from typing import Any, Optional

with reshard.open(pathlib.Path("a"), part="model") as checkpoint:
    part: NDArray[Any] = checkpoint["x"][1:2, ::2]
    shape: tuple[int, ...] = checkpoint["x"].shape
    tp: Optional[int] = checkpoint.mesh["tp"]
arrays: dict[str, NDArray[Any]] = reshard.load("a", part="model", names="hf")
report: reshard.LoadReport = reshard.load("a", into=arrays, mesh={"tp": 2}, rank=1)
reshard.convert("a", "b", to="hf", keep_dtype=["*norm*"], progress=lambda done, total: None)
why: list[str] = reshard.verify("a", values=True).findings[0].why
try:
    largest: Optional[reshard.RankMemory] = reshard.check(config="c", mesh="tp=2").largest
except reshard.MissingError as error:
    path: Optional[str] = error.path
"""
        wrong = """
import reshard
import reshard._load
arrays: int = reshard.load("a", part="model")
reshard.load("a", into={}, stricty=False)
reshard.convert("a", "b")
reshard.open("a", weights="both")
"""
        file = self.tmp / "program.py"
        for text, errors in ((right, 0), (wrong, 4)):
            file.write_text(text)
            done = mypy(file, "--strict")
            lines = {line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line}
            self.assertEqual(len(lines), errors, done.stdout + done.stderr)


@unittest.skipUnless(HAS_NBCLIENT and HAS_ML_DTYPES, "nbclient, ipykernel or ml_dtypes is not installed")
class Notebook(Case):
    def test_it_runs_and_its_kept_output_is_what_it_prints(self):
        import nbclient
        import nbformat

        def printed(notebook):
            return ["".join(o["text"] for o in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]

        notebook = nbformat.read(ROOT / "samples/notebook.ipynb", as_version=4)
        kept = printed(notebook)
        self.assertGreater(len([text for text in kept if text]), 4)
        resources = {"metadata": {"path": str(ROOT / "samples")}}
        with unittest.mock.patch.dict(os.environ, TMPDIR=str(self.tmp)):
            nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
        self.assertEqual(printed(notebook), kept)


class EveryName(Case):
    """All that the stub declares is taken from a real object, and is of the type that the stub says."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        program("synth", cls.tmp / "model", "--model", "llama3-tiny", "--to", "hf")
        program("synth", cls.tmp / "less", "--model", "llama3-tiny", "--to", "hf", "--without", "*layers.0.mlp.up_proj*")
        cls.stub = ast.parse((pathlib.Path(reshard.__file__).parent / "__init__.pyi").read_text())

    def functions(self):
        model, less, config = self.tmp / "model", self.tmp / "less", self.tmp / "model/config.json"
        return {
            "open": lambda: reshard.open(model),
            "load": lambda: [reshard.load(model), reshard.load(model, into=reshard.load(model))][1],
            "convert": lambda: reshard.convert(model, self.tmp / "out", to="dcp", force=True),
            "plan": lambda: reshard.plan(model, to="hf"),
            "verify": lambda: reshard.verify(less, config=config),
            "check": lambda: reshard.check(config=config, mesh="tp=2"),
            "diff": lambda: reshard.diff(model, model),
            "inspect": lambda: reshard.inspect(model),
            "merge": lambda: reshard.merge([model, model], self.tmp / "mean", average=True, to="hf", force=True),
            "latest": lambda: reshard.latest(self.a_run()),
            "families": reshard.families,
            "synth": lambda: reshard.synth(self.tmp / "made", model="llama3-tiny", layers=1, force=True),
            "mount": lambda: self.mounted(model),
        }

    def test_every_docstring_stands_alone(self):
        for name in self.functions():
            with self.subTest(name):
                text = inspect.getdoc(getattr(reshard, name))
                self.assertIn("Returns", text)
                example = re.search(r"^Example: (.*)\Z", text, re.M | re.S)
                self.assertIsNotNone(example, text)
                ast.parse(example.group(1))
                self.assertIn(f"{name}(", example.group(1))
                self.assertNotIn("docs/", text)
                self.assertLessEqual(max(map(len, text.splitlines())), 120)

    def test_latest_does_not_choose_between_models(self):
        (self.tmp / "models").mkdir()
        for name in ("actor", "critic"):
            reshard.synth(self.tmp / "models" / name, model="llama3-tiny", layers=1)
        with self.assertRaisesRegex(reshard.UnsupportedError, "several models; name one of them: .*actor, .*critic"):
            reshard.latest(self.tmp / "models")

    def a_run(self):
        (self.tmp / "run").mkdir(exist_ok=True)
        reshard.synth(self.tmp / "run/step-1", model="llama3-tiny", layers=1, force=True)
        return self.tmp / "run"

    def mounted(self, model):
        """A mount that has ended; where there is no FUSE, one that never was."""
        place = self.tmp / "mounted"
        place.mkdir(exist_ok=True)
        if not os.access("/dev/fuse", os.W_OK):
            return reshard.Mount(str(place))
        with reshard.mount(model, place, to="dcp") as mount:
            self.assertEqual(set(reshard.open(mount.path)), set(reshard.open(model)))
        self.assertEqual(os.listdir(place), [])
        with self.assertRaises(reshard.UsageError):
            reshard.mount(model, place, to="nothing")
        return mount

    def objects(self):
        """One of each class."""
        f = {name: call() for name, call in self.functions().items()}
        view = reshard.convert(self.tmp / "model", self.tmp / "look.h5", to="hdf5-view", force=True)
        tensor = next(iter(f["open"].values()))
        with self.assertRaises(reshard.MissingError) as caught:
            reshard.open(self.tmp / "nowhere")
        found = [f["open"], tensor, tensor.pieces[0], f["load"], f["convert"], f["plan"], f["verify"], f["verify"].findings[0],
                 f["verify"].checks[0], f["check"], f["check"].largest, f["diff"], f["diff"].tensors[0], f["inspect"], view,
                 caught.exception, f["families"][0], f["mount"], f["open"].get_slice("model.norm.weight")]  # fmt: skip
        out = {type(o).__name__: o for o in found}
        for name in ("Error", "UsageError", "CorruptError", "UnsupportedError", "FileError", "RankError", "InternalError"):
            out[name] = getattr(reshard, name)("message", "path", "tensor", 3)
        return out

    CALLS = {
        ("Tensor", "numpy"): lambda t: t.numpy(),
        ("Tensor", "torch"): lambda t: t.torch() if HAS_TORCH else None,
        ("Tensor", "__len__"): lambda t: len(t),
        ("Tensor", "__getitem__"): lambda t: t[0],
        ("Tensor", "__array__"): lambda t: t.__array__(),
        ("Tensor", "__dlpack__"): lambda t: t.__dlpack__(),
        ("Tensor", "__dlpack_device__"): lambda t: t.__dlpack_device__(),
        ("Checkpoint", "__getitem__"): lambda c: c["model.norm.weight"],
        ("Checkpoint", "__iter__"): lambda c: iter(c),
        ("Checkpoint", "__len__"): lambda c: len(c),
        ("Checkpoint", "view"): lambda c: c.view(names="hf"),
        ("Checkpoint", "__enter__"): lambda c: c.__enter__(),
        ("Checkpoint", "__exit__"): lambda c: reshard.open(c.path).__exit__(None, None, None),
        ("Checkpoint", "get_tensor"): lambda c: c.get_tensor("model.norm.weight"),
        ("Checkpoint", "get_slice"): lambda c: c.get_slice("model.norm.weight"),
        ("Checkpoint", "metadata"): lambda c: c.metadata(),
        ("Slice", "get_shape"): lambda s: s.get_shape(),
        ("Slice", "get_dtype"): lambda s: s.get_dtype(),
        ("Slice", "__getitem__"): lambda s: s[:3],
        ("Mount", "unmount"): lambda m: None,
        ("Mount", "__enter__"): lambda m: m.__enter__(),
        ("Mount", "__exit__"): lambda m: None,
        ("Checkpoint", "close"): lambda c: reshard.open(c.path).close(),
        ("VerifyReport", "__bool__"): bool,
        ("CheckReport", "__bool__"): bool,
        ("DiffReport", "__bool__"): bool,
    }

    def is_of(self, value, hint):
        """Whether a value is of a type as the stub writes it."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is typing.Any or hint is None:
            return hint is typing.Any or value is None
        if origin is typing.Union:
            return any(self.is_of(value, h) for h in arguments)
        if origin is typing.Literal:
            return value in arguments
        if origin is tuple and arguments[-1:] == (...,):
            return isinstance(value, tuple) and all(self.is_of(v, arguments[0]) for v in value)
        if origin is tuple:
            return isinstance(value, tuple) and len(value) == len(arguments) and all(map(self.is_of, value, arguments))
        if origin in (list, collections.abc.Iterator) and origin is list:
            return isinstance(value, list) and all(self.is_of(v, arguments[0]) for v in value)
        if origin is dict:
            return isinstance(value, dict) and all(self.is_of(k, arguments[0]) and self.is_of(v, arguments[1]) for k, v in value.items())
        if origin is not None:
            return isinstance(value, origin)
        return isinstance(value, (int, float) if hint is float else hint)

    def hint(self, annotation):
        scope = dict(vars(typing), **{n: getattr(reshard, n) for n in reshard.__all__}, Iterator=collections.abc.Iterator,
                     _Array=numpy.ndarray)  # fmt: skip
        return eval(compile(ast.Expression(annotation), "stub", "eval"), scope)

    def test_every_class(self):
        objects = self.objects()
        for node in (n for n in self.stub.body if isinstance(n, ast.ClassDef)):
            thing = objects[node.name]
            for member in node.body:
                if isinstance(member, ast.AnnAssign):
                    name, annotation, call = member.target.id, member.annotation, None
                elif isinstance(member, ast.FunctionDef):
                    name, annotation = member.name, member.returns
                    call = None if member.decorator_list else self.CALLS[node.name, name]
                else:
                    continue
                with self.subTest(f"{node.name}.{name}"):
                    value = call(thing) if call else getattr(thing, name)
                    self.assertTrue(self.is_of(value, self.hint(annotation)), f"{value!r} is no {ast.unparse(annotation)}")
            self.assertTrue(repr(thing))
            if hasattr(thing, "_repr_html_"):
                self.assertIn("</", thing._repr_html_())

    def test_every_function(self):
        calls = self.functions()
        declared = {n.name for n in self.stub.body if isinstance(n, ast.FunctionDef)}
        self.assertEqual(declared, set(calls))
        for name, call in calls.items():
            returns = [self.hint(n.returns) for n in self.stub.body if isinstance(n, ast.FunctionDef) and n.name == name]
            self.assertTrue(any(self.is_of(call(), hint) for hint in returns), name)

    def test_what_convert_returns_follows_from_its_arguments(self):
        model = self.tmp / "model"
        for to, dry_run, kind in (("dcp", False, reshard.Conversion), ("dcp", True, reshard.ConversionPlan),
                                  ("hdf5-view", False, reshard.TensorView), ("hdf5-view", True, reshard.TensorView)):  # fmt: skip
            done = reshard.convert(model, self.tmp / f"as_{to}", to=to, dry_run=dry_run, force=True)
            self.assertIs(type(done), kind)
        formats = {f["name"] for f in json.loads(program("--version", "--json"))["formats"] if f["writes"]}
        literal = next(n.value for n in self.stub.body if isinstance(n, ast.Assign) and n.targets[0].id == "_Format")
        self.assertEqual(set(typing.get_args(self.hint(literal))), formats - {"hdf5-view"})

    def test_digests_and_files_are_counted_as_they_are(self):
        done = reshard.convert(self.tmp / "model", self.tmp / "cut", to="hf", max_shard_size="300kB")
        manifest = json.loads((self.tmp / "cut/reshard_manifest.json").read_text())
        self.assertEqual((done.tensors, done.digests), (len(manifest["tensors"]),) * 2)
        self.assertEqual([f["path"] for f in done.files if not f["tensors"]], ["model.safetensors.index.json"])
        shards = len(list((self.tmp / "cut").glob("*.safetensors")))
        self.assertGreater(shards, 1)
        self.assertIn(f"in {shards} files>", repr(done))
        again = reshard.convert(self.tmp / "cut", self.tmp / "again", to="hf")
        self.assertEqual((again.digests, again.source_digests), (done.tensors,) * 2)


class Calls(Case):
    """What one call is given, the next and those of other threads do not see."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        program("synth", cls.tmp / "model", "--model", "llama3-tiny", "--to", "hf")
        cls.config = cls.tmp / "model/config.json"

    def family(self, name, of="llama"):
        path = self.tmp / f"{name}.json"
        path.write_text(json.dumps({"reshard_family": 1, "name": name, "model_types": [of], "extends": "llama"}))
        return path

    def test_a_family_is_of_one_call(self):
        mine = self.family("mine")
        with reshard.open(self.tmp / "model") as checkpoint:
            before = sorted(checkpoint.view(names="hf"))
        plain = reshard.verify(self.tmp / "model").family
        self.assertEqual(reshard.verify(self.tmp / "model", family_file=mine).family, "mine")
        self.assertEqual(reshard.verify(self.tmp / "model").family, plain)
        self.assertEqual(reshard.check(config=self.config, mesh="tp=2", family_file=mine).family, "mine")
        self.assertEqual(reshard.check(config=self.config, mesh="tp=2").family, plain)
        self.assertEqual(reshard.plan(self.tmp / "model", to="dcp", names="torchtitan", family_file=mine).family, "mine")
        self.assertEqual(reshard.plan(self.tmp / "model", to="dcp", names="torchtitan").family, plain)
        with reshard.open(self.tmp / "model") as checkpoint:
            self.assertEqual(sorted(checkpoint.view(names="hf", family_file=mine)), before)
        with self.assertRaises(reshard.UsageError):
            reshard.verify(self.tmp / "model", family="mine")
        reshard.convert(self.tmp / "model", self.tmp / "titan", to="dcp", names="torchtitan", family_file=mine)
        self.assertTrue(reshard.verify(self.tmp / "titan", bytes=True, config=self.config, family_file=mine))
        with self.assertRaisesRegex(reshard.UnsupportedError, "'mine'"):
            reshard.verify(self.tmp / "titan", bytes=True, config=self.config)

    def test_a_family_file_that_changed_is_read_again(self):
        for name in ("first", "second"):
            self.family("changing").write_text(self.family(name).read_text())
            self.assertEqual(reshard.verify(self.tmp / "model", family_file=self.tmp / "changing.json").family, name)

    def test_the_environment_is_that_of_the_call(self):
        """Other threads may change it meanwhile."""
        stop = threading.Event()

        def change():
            for i in range(1_000_000):
                if stop.is_set():
                    return
                os.environ[f"RESHARD_TEST_{i % 999}"] = "x" * (i % 77)

        with unittest.mock.patch.dict(os.environ, {"RESHARD_MEMORY": "1"}):
            for call in (reshard.verify, reshard.load):
                with self.assertRaisesRegex(reshard.UsageError, "memory"):
                    call(self.tmp / "model")
            reshard.verify(self.tmp / "model", memory="64MiB")
            thread = threading.Thread(target=change)
            thread.start()
            try:
                for _ in range(50):
                    with reshard.open(self.tmp / "model") as checkpoint:
                        checkpoint.view(names="hf")
                    reshard.check(config=self.config, mesh="tp=2")
            finally:
                stop.set()
                thread.join()

    def test_threads_with_families_of_their_own(self):
        def call(i):
            mine = self.family(f"mine_{i}") if i % 2 else None
            name = f"mine_{i}" if i % 2 else "llama"
            self.assertEqual(reshard.verify(self.tmp / "model", family_file=mine, threads=2).family, name)
            self.assertEqual(reshard.plan(self.tmp / "model", to="dcp", names="torchtitan", family_file=mine).family, name)
            out = self.tmp / f"out_{i}"
            done = reshard.convert(self.tmp / "model", out, to="dcp", names="torchtitan", family_file=mine, memory="32MiB")
            self.assertEqual(done.family, name)
            arrays = reshard.load(out, names="hf", config=self.config, family_file=mine)
            with reshard.open(self.tmp / "model") as checkpoint:
                for tensor, array in arrays.items():
                    self.assert_same(bits(array), bits(checkpoint[tensor].numpy()))
            return True

        with concurrent.futures.ThreadPoolExecutor(8) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.assertEqual(list(pool.map(call, range(24))), [True] * 24)


class Documentation(Case):
    def test_every_example_of_docs_python_md(self):
        """The blocks are one session, in a directory where step-1000 and step-2000 are checkpoints of a run."""
        text = (ROOT / "docs/python.md").read_text()
        blocks = re.findall(r"```python\n(.*?)```", text, re.S)
        self.assertGreater(len(blocks), 5)
        for step in ("step-1000", "step-2000"):
            program(
                "synth",
                self.tmp / step,
                "--model",
                "llama3-tiny",
                "--mesh",
                "dp_shard=4,tp=2",
                "--names",
                "torchtitan",
                "--optimizer",
            )
        (self.tmp / "config.json").write_bytes((self.tmp / "step-1000/config.json").read_bytes())
        here = os.getcwd()
        os.chdir(self.tmp)
        try:
            scope = {}
            for block in blocks:
                if not HAS_TORCH and "torch" in block:
                    continue
                with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
                    exec(compile(block, "docs/python.md", "exec"), scope)
                said = [line.split("# prints ", 1)[1] for line in block.splitlines() if "# prints " in line]
                self.assertEqual(out.getvalue().splitlines(), said, block)
        finally:
            os.chdir(here)

    @unittest.skipUnless(HAS_MYPY, "no mypy")
    def test_every_example_is_of_the_types_that_it_takes(self):
        """The blocks of each document, and the cells of the notebook, are one program for a type checker."""
        settings = self.tmp / "mypy.ini"
        settings.write_text("[mypy]\nstrict = True\n" + "".join(
            f"[mypy-{name}.*]\nignore_missing_imports = True\nfollow_imports = skip\n" for name in ("torch", "ml_dtypes")))  # fmt: skip
        for document in ("docs/python.md", "README.md", "samples/notebook.ipynb"):
            text = "from typing import Any\nmodel: Any = None\n" if document == "README.md" else ""
            content = (ROOT / document).read_text()
            if document.endswith(".ipynb"):
                code = ["".join(c["source"]) for c in json.loads(content)["cells"] if c["cell_type"] == "code"]
            else:
                code = re.findall(r"```python\n(.*?)```", content, re.S)
            text += "\n".join(code)
            file = self.tmp / "examples.py"
            file.write_text(text)
            done = mypy(file, "--config-file", settings)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_example_of_the_readme(self):
        (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
        (self.tmp / "readme").mkdir()
        program("synth", self.tmp / "readme/step-1000", "--model", "llama3-tiny", "--mesh", "tp=2", "--names", "torchtitan")
        here = os.getcwd()
        os.chdir(self.tmp / "readme")
        try:
            arrays = reshard.load("step-1000", mesh="tp=4,dp_shard=2", rank=3)
            into = {name: numpy.zeros_like(array) for name, array in arrays.items()}
            model = type("Model", (), {"state_dict": lambda self: into})()
            with contextlib.redirect_stderr(io.StringIO()):
                exec(compile(block, "README.md", "exec"), {"model": model})
            for name, array in arrays.items():
                self.assert_same(bits(into[name]), bits(array))
            self.assertTrue(reshard.verify("step-1000", against="model"))
        finally:
            os.chdir(here)


if __name__ == "__main__":
    outcome = unittest.main(exit=False, verbosity=0).result
    failed = len(outcome.failures) + len(outcome.errors)
    print(
        f"python: {outcome.testsRun - failed - len(outcome.skipped)} passed, {failed} failed, {len(outcome.skipped)} skipped"
    )
    sys.exit(failed > 0)
