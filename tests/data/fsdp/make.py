"""Makes the directories beside it: python make.py DIRECTORY. Files of ranks as verl and Accelerate leave them, by real
torch.save of real FSDP and tensor parallelism on CPUs (torch 2.15). Every weight, and every gradient of the one step that
is taken, is a number made from the parameter's name, so that full.safetensors needs no FSDP; betas are powers of two.
fsdp2_tp2_torch26 is not made here: torch 2.6 wrote it, and fsdp2_tp2_torch26.digests.json has what is in it."""
import json
import os
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SHAPES = {"embed.weight": (13, 4), "layers.0.w1": (7, 4), "layers.0.w2": (4, 7), "layers.0.norm": (4,),
          "layers.1.w1": (7, 4), "layers.1.w2": (4, 7), "layers.1.norm": (4,), "norm.weight": (4,), "head.weight": (13, 4)}


def weight(name):
    i, shape = list(SHAPES).index(name), SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 100 * i


def gradient(name):
    return 2 * weight(name) + 50


class Part(nn.Module):
    """Its parameters, and as its output their products with the gradients they are to have."""

    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix
        self.own = [n[len(prefix):] for n in SHAPES if n.startswith(prefix) and "." not in n[len(prefix):]]
        for name in self.own:
            self.register_parameter(name, nn.Parameter(weight(prefix + name)))

    def forward(self, x):
        for name in self.own:
            x = x + (getattr(self, name) * gradient(self.prefix + name)).sum()
        return x


class Layer(Part):
    pass


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = Part("embed.")
        self.layers = nn.ModuleList(Layer(f"layers.{i}.") for i in range(2))
        self.norm = Part("norm.")
        self.norm.register_buffer("scale", torch.tensor([3.0, 5.0]))
        self.head = Part("head.")
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        for part in [self.embed, *self.layers, self.norm, self.head]:
            x = part(x)
        return x


def truth(tied):
    out = {"norm.scale": torch.tensor([3.0, 5.0])}
    for name in SHAPES:
        source = "embed.weight" if tied and name == "head.weight" else name
        out[name] = weight(source).clone()
        if source == name:
            out[f"optimizer.state.{name}.exp_avg"] = gradient(name) / 2
            out[f"optimizer.state.{name}.exp_avg_sq"] = gradient(name) ** 2 / 4
            out[f"optimizer.state.{name}.step"] = torch.tensor(1.0)
    return out


# writer, mesh, and how the model is sharded
JOBS = {
    "fsdp2_tp2": dict(writer="verl", fsdp=2, mesh=dict(fsdp=3, tp=2)),
    "hsdp_tied": dict(writer="verl", fsdp=2, mesh=dict(ddp=2, fsdp=2), tied=True),
    "fsdp2_ignored": dict(writer="verl", fsdp=2, mesh=dict(fsdp=2), ignored=["norm.weight", "layers.1.norm"]),
    "fsdp1_sharded": dict(writer="verl", fsdp=1, mesh=dict(fsdp=3), use_mesh=False),
    "fsdp1_hybrid": dict(writer="verl", fsdp=1, mesh=dict(ddp=2, fsdp=2), use_mesh=True),
    "fsdp1_orig_params": dict(writer="verl", fsdp=1, mesh=dict(fsdp=3), use_mesh=True, orig=True),
    "one_rank": dict(writer="verl", fsdp=0, mesh=dict(fsdp=1)),
    "accelerate_fsdp2": dict(writer="accelerate", fsdp=2, mesh=dict(fsdp=3)),
    "accelerate_fsdp1": dict(writer="accelerate", fsdp=1, mesh=dict(fsdp=2), use_mesh=False),
}


def shard(model, job):
    mesh = init_device_mesh("cpu", tuple(job["mesh"].values()), mesh_dim_names=tuple(job["mesh"]))
    if job["fsdp"] == 0:
        return model
    if job["fsdp"] == 1:
        strategy = ShardingStrategy.HYBRID_SHARD if "ddp" in job["mesh"] else ShardingStrategy.FULL_SHARD
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=torch.device("cpu"),
                    sharding_strategy=strategy, use_orig_params=job.get("orig", False),
                    **(dict(device_mesh=mesh) if job["use_mesh"] else {}))
    if "tp" in job["mesh"]:
        for layer in model.layers:
            for name, dim in (("w1", 0), ("w2", 1)):
                full = getattr(layer, name).detach()
                layer.register_parameter(name, nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(dim)])))
        mesh = mesh["fsdp"]
    ignored = {dict(model.named_parameters())[name] for name in job.get("ignored", [])}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def local_gradient(full, parameter):
    """Tensor parallelism cuts first, FSDP cuts what that leaves; distribute_tensor refuses rows that do not divide."""
    mesh, local = parameter.device_mesh, full
    for axis in [i for i, p in enumerate(parameter.placements) if type(p).__name__ == "Shard"] + [
            i for i, p in reversed(list(enumerate(parameter.placements))) if type(p).__name__ == "_StridedShard"]:
        dim, at = parameter.placements[axis].dim, mesh.get_coordinate()[axis]
        pieces = torch.chunk(local, mesh.size(axis), dim)
        local = pieces[at] if at < len(pieces) else local.narrow(dim, 0, 0)
    assert local.shape == parameter._local_tensor.shape
    return DTensor.from_local(local.contiguous(), mesh, parameter.placements, run_check=False, shape=full.shape,
                              stride=full.stride())


def rank_main(rank, world, job, out, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    model = shard(Model(job.get("tied", False)), job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.5, 0.75), weight_decay=0.0, foreach=False)
    if job["fsdp"] == 2:
        for name, p in model.named_parameters():
            p.grad = local_gradient(gradient(name), p) if isinstance(p, DTensor) else gradient(name)
    else:
        model(torch.zeros(())).backward()
    optimizer.step()
    kind = FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT) if job["fsdp"] == 1 else None
    if kind:
        kind.__enter__()
    if job["writer"] == "verl":
        tag = f"world_size_{world}_rank_{rank}.pt"
        torch.save(model.state_dict(), os.path.join(out, "model_" + tag))
        torch.save(optimizer.state_dict(), os.path.join(out, "optim_" + tag))
        extra = {"lr_scheduler": {"last_epoch": 1}, "rng": {"cpu": torch.arange(4) + rank, "numpy": np_state(rank)}}
        torch.save(extra, os.path.join(out, "extra_state_" + tag))
        if rank == 0:
            with open(os.path.join(out, "fsdp_config.json"), "w") as f:
                json.dump({"FSDP_version": job["fsdp"], "world_size": world}, f)
    else:  # accelerate/utils/fsdp_utils.py, save_fsdp_model and save_fsdp_optimizer
        if job["fsdp"] == 1:
            states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        else:
            states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        torch.save(states[0], os.path.join(out, f"pytorch_model_fsdp_0_rank{rank}.bin"))
        torch.save(states[1], os.path.join(out, f"optimizer_0_rank{rank}.bin"))
    dist.barrier()
    dist.destroy_process_group()


def np_state(rank):
    import numpy
    return ("MT19937", numpy.arange(3, dtype=numpy.uint32) + rank, 7)


def main(root, only):
    for name, job in JOBS.items():
        if only and name not in only:
            continue
        out = os.path.join(root, name)
        os.makedirs(out, exist_ok=True)
        world = 1
        for n in job["mesh"].values():
            world *= n
        store = tempfile.mktemp()
        torch.multiprocessing.start_processes(rank_main, args=(world, job, out, store), nprocs=world, start_method="fork")
        full = truth(job.get("tied", False))
        save_file({k: v.contiguous() for k, v in full.items()}, os.path.join(root, name + ".safetensors"))
        print("made", name, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2:])
