# SPDX-License-Identifier: Apache-2.0
"""torch's device meshes, DTensors and modules, as load() takes them. Imported only when a caller hands them over."""

import json

from ._errors import UsageError
from ._words import glob_escaped

# The axes of a mesh in the order of ranks, slowest first, and other names that people give them.
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_ALIASES = {"dp": "dp_shard", "fsdp": "dp_shard", "shard": "dp_shard", "data": "dp_shard", "ddp": "dp_replicate",
            "replicate": "dp_replicate", "tensor": "tp", "model": "tp", "context": "cp", "expert": "ep", "pipeline": "pp"}  # fmt: skip
_CUTTING = ("dp_shard", "cp", "tp", "ep")  # axes along which a layout may cut


def is_device_mesh(value):
    """Whether a value is a torch DeviceMesh."""
    return hasattr(value, "mesh_dim_names") and hasattr(value, "get_coordinate")


def is_dtensor(value):
    return hasattr(value, "to_local") and hasattr(value, "device_mesh") and hasattr(value, "placements")


def is_module(value):
    return hasattr(value, "state_dict") and hasattr(value, "named_parameters")


def _sizes(mesh):
    return [int(n) for n in mesh.mesh.shape]


def axes_of(mesh):
    """Returns {axis: size} of a DeviceMesh, by the names of its dimensions."""
    names = mesh.mesh_dim_names
    if names is None:
        if len(_sizes(mesh)) > 1:
            raise UsageError(f"mesh: {mesh}: expected names of its dimensions (mesh_dim_names), such as "
                             '("dp_shard", "tp")')  # fmt: skip
        names = ("dp_shard",)
    out = {}
    for name, size in zip(names, _sizes(mesh)):
        axis = _ALIASES.get(name, name)
        if axis not in _AXES or axis in out:
            raise UsageError(f"mesh: dimension {name!r} of {tuple(names)}: expected different ones of {', '.join(_AXES)}")
        out[axis] = size
    return out


def rank_in(mesh):
    """Returns this process' rank in the order of reshard's axes, which need not be the mesh's own."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"mesh: this process is not in {mesh}")
    axes = axes_of(mesh)
    return _rank(axes, dict(zip(axes, coordinate)))


def _rank(axes, coordinate):
    rank = 0
    for axis in _AXES:
        if axis in axes:
            rank = rank * axes[axis] + coordinate[axis]
    return rank


class _Joined:
    """The dimensions of all meshes of some DTensors."""

    def __init__(self):
        self.sizes, self.coordinates, self.cutting = {}, {}, set()

    def add(self, name, tensor):
        """Returns the tensor's splits, as pairs of a mesh dimension and a tensor dimension, in order."""
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or tuple(f"dimension {i} of {_sizes(mesh)}" for i in range(len(_sizes(mesh))))
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise UsageError(f"into: tensor {name!r}: this process is not in its mesh", tensor=name)
        first, then = [], []
        for axis, size, at, placement in zip(names, _sizes(mesh), coordinate, tensor.placements):
            if self.sizes.setdefault(axis, size) != size or self.coordinates.setdefault(axis, at) != at:
                raise UsageError(f"into: tensor {name!r}: two meshes have different dimensions {axis!r}", tensor=name)
            if placement.is_shard() or hasattr(placement, "split_factor"):
                self.cutting.add(axis)
                # A _StridedShard is of FSDP over tensor parallelism: it cuts what the later dimensions leave.
                (then if hasattr(placement, "split_factor") else first).append((axis, placement.dim))
            elif placement.is_partial():
                raise UsageError(f"into: tensor {name!r}: each rank holds a summand of it ({tensor.placements}), not a "
                                 "part; redistribute() it first", tensor=name)  # fmt: skip
        return first + then

    def labels(self):
        """Returns a layout's axis for each mesh dimension that cuts a tensor."""
        cutting = [axis for axis in self.sizes if axis in self.cutting]
        if len(cutting) > len(_CUTTING):
            raise UsageError(f"into: expected tensors cut along at most {len(_CUTTING)} mesh dimensions, got {cutting}")
        known = {a: _ALIASES.get(a, a) for a in cutting}
        if len(set(known.values())) == len(known) and all(k in _CUTTING for k in known.values()):
            return known
        return dict(zip(cutting, _CUTTING))


def layout_of(into):
    """Returns (layout descriptor as text, rank) by which the DTensors among `into` are cut; None if there are none.

    Tensors of `into` that are not DTensors are whole on every rank.
    """
    joined = _Joined()
    splits = {name: joined.add(name, tensor) for name, tensor in into.items() if is_dtensor(tensor)}
    if not splits:
        return None
    labels = joined.labels()
    rules = {}
    for name, cuts in splits.items():
        rules.setdefault(tuple(cuts), []).append(glob_escaped(name))
    axes = {labels[axis]: joined.sizes[axis] for axis in labels}
    at = {labels[axis]: joined.coordinates[axis] for axis in labels}
    layout = {
        "reshard_layout": 1,
        "name": "DTensors",
        "mesh": [{"axis": axis, "size": axes[axis]} for axis in _AXES if axis in axes],
        "files": "shards",
        "tensors": [
            {"names": names, "splits": [{"axes": [labels[axis]], "dim": dim} for axis, dim in cuts]}
            for cuts, names in rules.items()
        ] + [{"names": ["*"], "splits": []}],
    }  # fmt: skip
    return json.dumps(layout), _rank(axes, at)


# ---- modules


def tensors_of(module, device):
    """Returns (tensors to fill, by the names of state_dict(), and finish()).

    Parameters and buffers on the meta device get memory on `device`, which finish() puts into the module; DTensors stay
    DTensors, tied parameters stay tied, and requires_grad is kept.
    """
    import torch

    state = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    made = {}  # by the identity of what is on the meta device
    for tensor in state.values():
        if tensor.device.type == "meta" and id(tensor) not in made:
            made[id(tensor)] = _materialised(tensor, device, torch)
    into = {name: made.get(id(tensor), tensor).detach() for name, tensor in state.items()}

    def finish():
        left = []
        for path, part in module.named_modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in list(table.items()):
                    if tensor is not None and id(tensor) in made:
                        table[name] = made[id(tensor)]
                    elif tensor is not None and tensor.device.type == "meta":
                        left.append(f"{path}.{name}" if path else name)
        return left

    return into, finish


def _materialised(tensor, device, torch):
    if is_dtensor(tensor):
        local = torch.empty(tensor.to_local().shape, dtype=tensor.dtype, device=device or tensor.device_mesh.device_type)
        out = type(tensor).from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                                      stride=tensor.stride())  # fmt: skip
    else:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device or "cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(out, requires_grad=tensor.requires_grad)
    return out
