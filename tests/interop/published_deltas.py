"""Publishes weight deltas as slime and miles do, with the libraries that they use (safetensors, zstandard, xxhash, blake3).

Written after slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py and slime/utils/disk_delta.py.
A version is a directory `weight_v000001` with the tensors that changed since the version before, over as many files as
ranks had any, and an index that names both versions.
"""
import json
import zlib

import numpy as np
import safetensors.numpy
import xxhash
import zstandard


def checksum(algorithm, data):
    if algorithm == "blake3":
        import blake3
        return blake3.blake3(data).hexdigest()
    return xxhash.xxh3_128(data).hexdigest() if algorithm == "xxh3-128" else f"{zlib.adler32(data):08x}"


def overwriting(positions, values):
    """A change in the encoding `overwrite`."""
    return np.concatenate([np.array([positions.size], "<u4").view(np.uint8), positions.astype("<u4").view(np.uint8), values])


def publish(directory, version, old, new, encoding="xor", algorithm="xxh3-128", ranks=2, encode=overwriting):
    """Writes what `new` changes in `old`, both {name: bytes}. Returns the version's directory."""
    out = directory / f"weight_v{version:06d}"
    out.mkdir(parents=True)
    parts = [({}, {}) for _ in range(ranks)]
    for i, name in enumerate(sorted(new)):
        before, after = (np.frombuffer(side[name], dtype=np.uint8) for side in (old, new))
        if (before == after).all():
            continue
        change = before ^ after
        if encoding == "overwrite":
            at = np.flatnonzero(change)
            change = encode(at, after[at])
        tensors, sums = parts[i % ranks]
        tensors[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(change.tobytes()), dtype=np.uint8)
        sums[name] = checksum(algorithm, new[name])
    parts = [part for part in parts if part[0]]
    weight_map = {}
    for i, (tensors, sums) in enumerate(parts):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        (out / file).write_bytes(safetensors.numpy.save(tensors, metadata=sums))
        weight_map.update({name: file for name in tensors})
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
                "compression_format": "zstd", "checksum_format": algorithm}  # fmt: skip
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return out
