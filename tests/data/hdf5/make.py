"""Makes long_paths.h5 (h5py 3): groups of 4,000 letters in one another, and 2,000 hard links to one dataset in the last.
The file is small; the paths of its objects are 48 MB."""
import pathlib

import h5py
import numpy

with h5py.File(pathlib.Path(__file__).parent / "long_paths.h5", "w", libver="latest") as f:
    group = f
    for i in range(6):
        group = group.create_group(chr(ord("a") + i) * 4000)
    first = group.create_dataset("w", data=numpy.zeros(2, "f4"))
    for i in range(2000):
        group[f"w{i}"] = first
