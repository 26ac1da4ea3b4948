"""Makes checkpoints with the real libraries, and what is in them: NAME.json holds the dtype, shape and SHA-256 of each
tensor. Those of this directory are of seed 0.

usage: make.py OUT SEED

pip install jax==0.10.2 orbax-checkpoint==0.12.8 tensorstore==0.1.86
"""
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

OUT, SEED = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2])
WORDS = {"bfloat16": "BF16", "float32": "F32", "float64": "F64", "float16": "F16", "int32": "I32", "int64": "I64",
         "uint32": "U32", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "int4": "U8", "uint8": "U8", "int8": "I8",
         "int16": "I16"}


def digest(array):
    array = np.asarray(array)
    word = WORDS[str(array.dtype)]
    array = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    return [word, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def write_truth(name, tensors):
    lines = [f" {json.dumps(k)}: {json.dumps(digest(v))}" for k, v in sorted(tensors.items())]
    (OUT / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def fresh(name):
    path = OUT / name
    shutil.rmtree(path, ignore_errors=True)
    return path


def flat(tree):
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, str):
            out[".".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path)] = leaf
    return out


def sharded(mesh, array, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def devices(rows, columns):
    return Mesh(np.array(jax.devices()).reshape(rows, columns), ("fsdp", "tp"))


def tree_of(mesh):
    rng = np.random.default_rng([SEED, 0])

    def bf16(*shape):
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    return {
        "params": {
            "decoder": {"layers": {"kernel": sharded(mesh, bf16(16, 3, 12), "fsdp", None, "tp"),
                                   "bias": sharded(mesh, rng.standard_normal(12).astype(np.float32), None)}},
            "embedding": sharded(mesh, rng.standard_normal((64, 8)).astype(np.float32), "fsdp"),
            "key.with.dots": sharded(mesh, np.arange(4, dtype=np.int32)),
            "f8": jnp.asarray(rng.standard_normal((4, 4)), jnp.float8_e4m3fn),
            "flags": jnp.asarray([True, False, True]),
        },
        "opt_state": [{"count": jnp.asarray(7, jnp.int32)}, (sharded(mesh, np.zeros((64, 8), np.float32), "fsdp"),
                                                             np.arange(5, dtype=np.float64))],
        "step": 3,
        "rate": 0.125,
    }


def make_orbax():
    mesh = devices(4, 2)
    tree = tree_of(mesh)
    for name, options in {"zarr2": {}, "zarr3": {"use_zarr3": True}, "files": {"use_ocdbt": False},
                          "raw": {"use_zarr3": True, "use_compression": False}}.items():
        more = {"name": "hello", "nothing": None, "empty": {}} if name == "zarr3" else {}
        if name == "zarr3":
            more["int4"] = jnp.asarray(np.arange(-8, 8).reshape(4, 4), jnp.int4)
            more["rng"] = jax.random.key(7)
        path = fresh(name)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as saver:
            saver.save(path, args=ocp.args.PyTreeSave({**tree, **more}))
        more.pop("rng", None)
        write_truth(name, flat({**tree, **more}))
    path = fresh("manager")
    with ocp.CheckpointManager(path) as manager:
        manager.save(5, args=ocp.args.Composite(state=ocp.args.StandardSave(tree),
                                                meta=ocp.args.JsonSave({"tokens": 1000})))
        manager.wait_until_finished()
    write_truth("manager", flat(tree))
    state = {"params": {"w": jnp.arange(12.0).reshape(3, 4), "b": [jnp.ones(2), jnp.zeros(2)]},
             "opt_state": [{"count": jnp.ones((), int), "mu": {"w": jnp.ones((3, 4))}}, None]}
    path = fresh("items")
    with ocp.CheckpointManager(path) as manager:
        manager.save(1, args=ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in state.items()}))
    write_truth("items", flat(state))
    import orbax.checkpoint.experimental.v1 as v1
    (getattr(v1, "save_pytree", None) or v1.save)(fresh("v1"), {"a": tree["params"]["decoder"], "step": 3})
    write_truth("v1", flat({"a": tree["params"]["decoder"], "step": 3}))


def make_of_process(process):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{9700 + SEED % 100}", 2, process)
    mesh = devices(2, 2)
    rng = np.random.default_rng([SEED, 1])
    arrays = {"embed": rng.standard_normal((60, 32)).astype(np.float32),
              "layer": rng.standard_normal((64, 96)).astype(ml_dtypes.bfloat16)}
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True))
    saver.save(OUT / "two_processes", args=ocp.args.PyTreeSave(
        {name: sharded(mesh, array, "fsdp", "tp") for name, array in arrays.items()}))
    saver.close()
    if process == 0:
        write_truth("two_processes", arrays)


# What tensorstore may write and orbax does not: numbered manifests, a tree of several levels, shards of several chunks
# with the index at either end, other codecs, orders and byte orders, chunks that were never written.
def make_tensorstore():
    path = fresh("tensorstore")
    path.mkdir()
    store = {"driver": "ocdbt", "base": f"file://{path}/", "config": {
        "manifest_kind": "numbered", "max_decoded_node_bytes": 600, "max_inline_value_bytes": 100,
        "version_tree_arity_log2": 1, "compression": {"id": "zstd", "level": 3}}}
    rng = np.random.default_rng([SEED, 2])
    truth = {}

    def write(name, driver, array, metadata, part=None):
        spec = {"driver": driver, "kvstore": {**store, "path": f"{name}/"}, "create": True,
                "metadata": {"shape": list(array.shape), **metadata}}
        target = ts.open(spec).result()
        if part is None:
            target.write(array).result()
        else:
            target[part].write(array[part]).result()
        truth[name] = array

    little = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}

    def grid(*shape):
        return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}

    def shard(inner, codecs, where):
        return [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": inner, "codecs": codecs, "index_location": where,
            "index_codecs": [little, {"name": "crc32c"}]}}]

    floats = rng.standard_normal((25, 18)).astype(np.float32)
    for where in ("start", "end"):
        write(f"shard_{where}", "zarr3", floats, {"data_type": "float32", "chunk_grid": grid(10, 8),
                                                  "codecs": shard([5, 4], [little, zstd], where)})
    transpose = {"name": "transpose", "configuration": {"order": [2, 0, 1]}}
    cube = rng.integers(-99, 99, (6, 5, 4)).astype(np.int16)
    write("transposed", "zarr3", cube, {"data_type": "int16", "chunk_grid": grid(4, 3, 2),
                                        "codecs": [transpose, little, {"name": "gzip", "configuration": {"level": 5}},
                                                   {"name": "crc32c"}]})
    write("transposed_shard", "zarr3", cube, {"data_type": "int16", "chunk_grid": grid(4, 3, 2), "codecs": [
        {"name": "transpose", "configuration": {"order": [1, 2, 0]}}, *shard([3, 1, 2], [transpose, little], "end")]})
    write("big", "zarr3", cube, {"data_type": "int16", "chunk_grid": grid(6, 5, 4), "chunk_key_encoding": {"name": "v2"},
                                 "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]})
    old = {"dtype": "<f4", "compressor": {"id": "zlib", "level": 5}, "order": "F", "fill_value": None}
    write("fortran", "zarr", floats, {**old, "chunks": [10, 7]})
    write("gzip", "zarr", floats, {**old, "chunks": [25, 18], "compressor": {"id": "gzip", "level": 5}, "order": "C"})
    write("big_endian", "zarr", floats, {**old, "chunks": [20, 18], "dtype": ">f4", "compressor": None})
    holes = np.full((9, 4), 1.5, np.float32)
    holes[3:6] = 2.0
    write("holes", "zarr", holes, {**old, "chunks": [3, 4], "fill_value": 1.5}, np.s_[3:6])
    ones = np.full((4, 4), -1, np.int32)
    ones[:2, 2:] = 5
    write("holes_of_shards", "zarr3", ones, {"data_type": "int32", "fill_value": -1, "chunk_grid": grid(4, 4),
                                             "codecs": shard([2, 2], [little], "end")}, np.s_[:2, 2:])
    write_truth("tensorstore", truth)


# What T5X wrote: a directory for each array (zarr 2, compressed by gzip), "target.PATH" and "state.PATH", and next to
# them a msgpack file of Flax. Other arrays are compressed by blosc, numcodecs' default, with each of its codecs and shuffles.
def make_t5x():
    path = fresh("t5x") / "checkpoint_1000"
    path.mkdir(parents=True)
    rng = np.random.default_rng([SEED, 3])
    truth = {}

    def write(name, array, chunks, compressor):
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}, "create": True, "metadata": {
            "shape": list(array.shape), "chunks": chunks, "dtype": array.dtype.str, "compressor": compressor}}
        ts.open(spec).result().write(array).result()
        truth[name] = array

    def floats(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    write("target.encoder.layers_0.attention.query.kernel", floats(16, 24), [8, 24], {"id": "gzip", "level": 1})
    write("state.param_states.encoder.layers_0.attention.query.kernel.v", floats(16, 24), [16, 12],
          {"id": "gzip", "level": 1})
    for codec in ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd"):
        for shuffle in (0, 1, 2):
            write(f"target.blosc.{codec}_{shuffle}", np.repeat(floats(20, 9), 4, axis=1), [16, 36],
                  {"id": "blosc", "cname": codec, "clevel": 5, "shuffle": shuffle, "blocksize": 0})
    write("target.blosc.noise", rng.integers(0, 255, (40, 30)).astype(np.uint8), [40, 30],
          {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0})
    (path / "checkpoint").write_bytes(b"\x80")  # msgpack's empty map
    write_truth("t5x", truth)


if __name__ == "__main__":
    is_child = len(sys.argv) > 3
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={2 if is_child else 8}"
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np
    import orbax.checkpoint as ocp
    import tensorstore as ts
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    if is_child:
        make_of_process(int(sys.argv[3]))
    else:
        make_orbax()
        make_tensorstore()
        make_t5x()
        fresh("two_processes")
        children = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], str(process)]) for process in (0, 1)]
        assert [child.wait() for child in children] == [0, 0]
        for path in OUT.rglob("commit_success.txt"):
            path.write_text("Checkpoint commit was successful\n")  # orbax adds where that was
