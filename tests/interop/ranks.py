"""Several gloo ranks on this machine, for the interoperability tests: run(n, job, argument) runs a job of this file in n
processes. A job raises when something is wrong; the first traceback comes back as the caller's exception."""
import multiprocessing
import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

# The samples' .metadata was written by Python 3.13, which pickles paths under a module that only it has.
sys.modules.setdefault("pathlib._local", pathlib)


def run(ranks, job, argument):
    with tempfile.TemporaryDirectory() as directory:
        # Fork from a process that has imported torch, which takes seconds, and started no threads.
        multiprocessing.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.tensor"])
        mp.start_processes(_rank, args=(ranks, job, argument, os.path.join(directory, "store")), nprocs=ranks,
                           start_method="forkserver")


def _rank(rank, ranks, job, argument, store):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        job(rank, ranks, argument)
    finally:
        dist.destroy_process_group()


def same_bits(a, b):
    return (a.dtype == b.dtype and a.shape == b.shape and
            torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)))


def save_model_shards(rank, ranks, places):
    """(a model's safetensors, a directory): each rank's rows as Hugging Face's storage writer leaves them."""
    model, out = places
    mesh = init_device_mesh("cpu", (ranks,))
    state = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in load_file(model).items()}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=out, save_distributed=True))


def load_everywhere(rank, ranks, cases):
    """cases: (checkpoint directory, safetensors of the truth, prefix of the checkpoint's keys). Loads each into plain
    tensors and into DTensors of several placements, and compares this rank's part with the truth's."""
    meshes = [(init_device_mesh("cpu", (ranks,)), [[Shard(0)], [Shard(1)], [Replicate()]])]
    if ranks == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes.append((grid, [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)]]))
    for directory, truth, prefix in cases:
        full = {prefix + k: v for k, v in load_file(truth).items()}
        plain = {k: torch.empty_like(v) for k, v in full.items()}
        dcp.load(plain, checkpoint_id=directory)
        for k, v in full.items():
            assert same_bits(plain[k], v), f"{directory}: {k} differs in a plain tensor on rank {rank} of {ranks}"
        for mesh, all_placements in meshes:
            for placements in all_placements:
                # One-dimensional tensors cannot be cut along dimension 1.
                fit = {k: [p if getattr(p, "dim", 0) < v.dim() else Replicate() for p in placements]
                       for k, v in full.items()}
                wanted = {k: distribute_tensor(v, mesh, fit[k], src_data_rank=None) for k, v in full.items()}
                got = {k: distribute_tensor(torch.zeros_like(v), mesh, fit[k], src_data_rank=None)
                       for k, v in full.items()}
                dcp.load(got, checkpoint_id=directory)
                for k in full:
                    assert same_bits(got[k].to_local(), wanted[k].to_local()), \
                        f"{directory}: {k} differs under {placements} on rank {rank} of {ranks}"


def sample_tensors():
    """The tensors that the two-rank saves hold: uneven, empty on a rank, non-contiguous, scalar."""
    def values(*shape):
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) * 0.5 - 3
    return {
        "even": values(8, 6), "uneven": values(5, 3), "one_row": values(1, 7), "wide": values(3, 11).to(torch.bfloat16),
        "scalar": torch.tensor(2.5), "whole": values(4, 4).t(),
    }


def save_on_two_ranks(rank, ranks, argument):
    """argument: (directory, variant). Saves sample_tensors() with the first four cut, the rest on every rank."""
    directory, variant = argument
    mesh = init_device_mesh("cpu", (ranks,))
    placement = {"even": [Shard(0)], "uneven": [Shard(0)], "one_row": [Shard(0)], "wide": [Shard(1)]}
    state = {k: distribute_tensor(v, mesh, placement[k], src_data_rank=None) if k in placement else v
             for k, v in sample_tensors().items()}
    if variant == "default":
        dcp.save(state, checkpoint_id=directory)
    elif variant == "rank_local":
        dcp.save({k: v for k, v in state.items() if isinstance(v, DTensor)}, checkpoint_id=directory,
                 use_collectives=False)
    elif variant == "async":
        dcp.async_save(state, checkpoint_id=directory).result()
    elif variant in ("hf_sharded", "hf_consolidated"):
        writer = dcp.HuggingFaceStorageWriter(path=directory, save_distributed=True,
                                              enable_consolidation=variant == "hf_consolidated")
        # safetensors requires contiguous tensors, and the consolidation omits scalars.
        dcp.save({k: v.contiguous() for k, v in state.items() if v.dim()}, storage_writer=writer)
    else:
        raise ValueError(variant)
