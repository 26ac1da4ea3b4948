"""Restores checkpoints with orbax-checkpoint in every way that it has, on 8 virtual devices, and checks that all give the
same bits. Prints for each {"name": [dtype, shape, SHA-256], ...} on a line of its own.

usage: orbax_restore.py ITEM...    (an item at RUN/STEP/default is restored by a CheckpointManager, too)
"""
import hashlib
import json
import logging
import os
import pathlib
import sys
import warnings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import orbax.checkpoint.experimental.v1 as v1  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

jax.config.update("jax_enable_x64", True)
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
WORDS = {"bfloat16": "BF16", "float32": "F32", "float64": "F64", "float16": "F16", "bool": "BOOL", "complex64": "C64",
         "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
         **{f"{kind}int{bits}": f"{kind or 'i'}{bits}".upper() for kind in ("", "u") for bits in (8, 16, 32, 64)}}


def digests(tree):
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, str) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        array = np.asarray(leaf)
        name = ".".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path)
        out[name] = [WORDS[str(array.dtype)], list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    return out


def targets(metadata, rows, columns, turn):
    """Targets whose dimensions are sharded over a mesh, from dimension `turn` on, where it divides them."""
    mesh = Mesh(np.array(jax.devices()).reshape(rows, columns), ("x", "y"))

    def target(leaf):
        if not hasattr(leaf, "dtype"):
            return "a string"
        spec, axes = [None] * len(leaf.shape), ["x", "y"]
        for i in range(len(leaf.shape)):
            d = (i + turn) % len(leaf.shape)
            if axes and leaf.shape[d] and leaf.shape[d] % mesh.shape[axes[0]] == 0:
                spec[d] = axes.pop(0)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(target, metadata)


def restored(item):
    checkpointer = ocp.StandardCheckpointer()
    metadata = checkpointer.metadata(item).item_metadata.tree
    # StandardCheckpointer saves no strings and takes none in a target.
    has_strings = any(not hasattr(leaf, "dtype") for leaf in jax.tree.leaves(metadata))
    yield "no target", checkpointer.restore(item)
    for rows, columns, turn in ((4, 2, 0), (2, 4, 1), (8, 1, 0)):
        target = targets(metadata, rows, columns, turn)
        if has_strings:
            how = ocp.args.PyTreeRestore(item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
            yield f"{rows} x {columns}", ocp.PyTreeCheckpointer().restore(item, args=how)
        else:
            yield f"{rows} x {columns}", checkpointer.restore(item, target)
    yield "v1", v1.load(item, checkpointable_name=None)
    if item.name == "default":
        with ocp.CheckpointManager(item.parent.parent) as manager:
            step = int(item.parent.name)
            yield "manager", manager.restore(step, args=ocp.args.StandardRestore())
            if not has_strings:
                yield "manager, 4 x 2", manager.restore(step, args=ocp.args.StandardRestore(targets(metadata, 4, 2, 0)))


for argument in sys.argv[1:]:
    first = None
    for way, tree in restored(pathlib.Path(argument).absolute()):
        now = digests(tree)
        first = first or now
        differing = sorted(k for k in now.keys() | first.keys() if now.get(k) != first.get(k))
        if differing:
            sys.exit(f"{argument}: {way}: {differing[:3]} differ from what another way restores")
    print(json.dumps(first))
