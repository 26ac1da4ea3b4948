"""Makes the files beside it (h5py 3).

long_paths.h5   groups of 4,000 letters in one another, and 2,000 hard links to one dataset in the last: the file is
                small, the paths of its objects are 48 MB
odd.h5          datasets that are no tensors, each for another reason, among some that are
damaged_*.h5    what no writer of ours leaves, one thing in each
"""
import pathlib

import h5py
import numpy

here = pathlib.Path(__file__).parent


def new(name, libver="latest"):
    return h5py.File(here / name, "w", libver=libver)


with new("long_paths.h5") as f:
    group = f
    for i in range(6):
        group = group.create_group(chr(ord("a") + i) * 4000)
    first = group.create_dataset("w", data=numpy.zeros(2, "f4"))
    for i in range(2000):
        group[f"w{i}"] = first


def low_level(f, name, type_id, shape, plist=None):
    return h5py.h5d.create(f.id, name.encode(), type_id, h5py.h5s.create_simple(shape), plist)


with new("odd.h5", ("earliest", "v110")) as f:
    f["good.float"] = numpy.arange(6, dtype="f4").reshape(2, 3)
    f["good.big"] = numpy.arange(4, dtype=">i8")
    f["good.complex"] = numpy.array([1 + 2j, 3 - 4j], "c16")
    f["good.bool"] = numpy.array([True, False])
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    low_level(f, "compact", h5py.h5t.IEEE_F32LE, (4,), compact)
    layout = h5py.VirtualLayout((6,), "f4")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", (6,))
    f.create_virtual_dataset("virtual", layout)
    f["null"] = h5py.Empty("f4")
    f.create_dataset("unwritten", (4,), "f4")
    f.create_dataset("half_written", (4,), "f4", chunks=(2,))[:2] = 1
    f.create_dataset("external", (4,), "f4", external=[("a.bin", 0, 16)])
    f.create_dataset("externals", (4,), "f4", external=[("a.bin", 0, 8), ("b.bin", 0, 8)])
    f["strings"] = numpy.array([b"ab", b"cd"])
    f["texts"] = ["ab", "cde"]
    f["compound"] = numpy.zeros(2, [("a", "i4"), ("b", "f4")])
    f["opaque"] = numpy.array([b"abc"], "V3")
    f.create_dataset("enum", (2,), h5py.enum_dtype({"A": 0, "B": 7}))[:] = 7
    f.create_dataset("array", (2,), numpy.dtype(("f4", (2,))))[:] = numpy.ones((2, 2), "f4")
    f.create_dataset("lists", (2,), h5py.vlen_dtype("i4"))[:] = [[1], [2, 3]]
    f.create_dataset("references", (1,), h5py.ref_dtype)[0] = f["good.float"].ref
    f["long_double"] = numpy.zeros(2, "longdouble")
    twelve = h5py.h5t.STD_I16LE.copy()
    twelve.set_precision(12)
    low_level(f, "twelve_bits", twelve, (2,))
    f.create_dataset("lzf", data=numpy.zeros(100, "f4"), compression="lzf")
    f.create_dataset("many_chunks", (70_000,), "u1", chunks=(1,))
    f.create_dataset("large_chunks", (1 << 30,), "u1", chunks=(1 << 30,))
    f.create_dataset("dimensions", (1,) * 20, "u1")
    f["soft"] = h5py.SoftLink("/good.float")
    f["beyond"] = h5py.ExternalLink("elsewhere.h5", "/x")
    f.create_group("group")["circle"] = f["/"]

with new("damaged_dtype.h5") as f:
    f["w"] = numpy.zeros(4, "u1")
    f["w"].attrs.create("reshard_dtype", b"float32", dtype="S7")
with new("damaged_attribute.h5") as f:
    f["w"] = numpy.zeros(4, "u1")
    f["w"].attrs["reshard_name"] = 7
with new("damaged_path.h5") as f:
    f["w"] = numpy.zeros(4, "u1")
    f["w"].attrs.create("reshard_path", b"{}", dtype="S2")
with new("damaged_object.h5") as f:
    f["w"] = numpy.zeros(4, "u1")
    f["reshard/objects/0"] = numpy.zeros((2, 2), "u1")
with new("damaged_depth.h5") as f:
    group = f
    for _ in range(300):
        group = group.create_group("g")
with new("damaged_link.h5") as f:
    f["n" * 5000] = numpy.zeros(4, "u1")
