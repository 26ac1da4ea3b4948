#!/usr/bin/env python3
"""Writes tests/data/device/convert_golden.txt: what torch's tensor.to(dtype) makes of a fixed set of numbers.

A line is `from to count crc32`, the CRC-32 of the results' little-endian bytes. The numbers are made here and in
tests/lib/device/convert_test.cc by the same rules: every pattern of the 16-bit types; for the wider ones, patterns around
each rounding boundary and pseudo-random ones. On the way to bfloat16 NaNs are first replaced by 0x7FC0, because the bits
that torch gives them depend on the processor and on the element's place in the tensor.

    python3 tests/interop/make_convert_golden.py > tests/data/device/convert_golden.txt
"""

import sys
import zlib

import numpy
import torch

TYPES = {
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
    "float32": (torch.float32, torch.int32),
    "float64": (torch.float64, torch.int64),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.uint8),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8),
}
RANDOM = 1 << 20
LOW_HALVES = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


def mix(v):
    v = (v ^ (v >> numpy.uint64(32))) * numpy.uint64(0x9FB21C651E98DF25)
    v = (v ^ (v >> numpy.uint64(29))) * numpy.uint64(0xD6E8FEB86659FD93)
    return v ^ (v >> numpy.uint64(32))


def float32_bits():
    high = numpy.arange(1 << 16, dtype=numpy.uint32)[:, None] << 16
    edges = (high | numpy.array(LOW_HALVES, dtype=numpy.uint32)).reshape(-1)
    random = mix(numpy.arange(RANDOM, dtype=numpy.uint64) + 1) >> 32
    return numpy.concatenate([edges, random.astype(numpy.uint32)])


def float64_bits():
    r = mix(numpy.arange(RANDOM, dtype=numpy.uint64) + 1)
    mantissa = mix(r) >> 12
    for mode, bits, low in [(1, 29, 1 << 28), (2, 42, 1 << 41), (3, 45, 1 << 44), (4, 42, (1 << 41) + 1)]:
        replaced = mantissa >> bits << bits | numpy.uint64(low)
        mantissa = numpy.where((r & 7) == mode, replaced, mantissa)
    place = (r >> 8) % 340
    exponent = numpy.where(place == 0, 0, numpy.where(place == 339, 0x7FF, place + (1023 - 170))).astype(numpy.uint64)
    return r >> 63 << 63 | exponent << 52 | mantissa


def inputs(name):
    if name == "float32":
        return float32_bits().view(numpy.int32)
    if name == "float64":
        return float64_bits().view(numpy.int64)
    if name.startswith("float8"):
        return numpy.arange(1 << 8, dtype=numpy.uint8)
    return numpy.arange(1 << 16, dtype=numpy.uint16).view(numpy.int16)


def main():
    for source, (source_type, _) in TYPES.items():
        numbers = torch.from_numpy(inputs(source).copy()).view(source_type)
        for target, (target_type, bits_type) in TYPES.items():
            out = numbers.to(target_type)
            bits = out.view(bits_type)
            if target == "bfloat16" and source != target:
                bits = torch.where(out.isnan(), torch.tensor(0x7FC0, dtype=torch.int16), bits)
            sys.stdout.write(f"{source} {target} {len(numbers)} {zlib.crc32(bits.numpy().tobytes()):08x}\n")


if __name__ == "__main__":
    main()
