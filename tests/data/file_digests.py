"""The contents of a safetensors file, for scripts that make test data."""
import hashlib, json, struct


def digests(path):
    """Returns the dtype, the shape and the SHA-256 of the bytes of each tensor, by name."""
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    def entry(v):
        a, b = v["data_offsets"]
        return [v["dtype"], v["shape"], hashlib.sha256(data[8 + n + a:8 + n + b]).hexdigest()]
    return {k: entry(v) for k, v in sorted(header.items())}
