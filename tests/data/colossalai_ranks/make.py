"""Makes the files beside it: python make.py DIRECTORY. Files of ranks as colossalai.utils.checkpoint_io of releases
0.2.0 to 0.3.1 left them, written with real torch.save; the class of the metadata is made here."""
import dataclasses
import os
import sys
import types

import torch
from safetensors.torch import save_file

for name in ("colossalai", "colossalai.utils", "colossalai.utils.checkpoint_io", "colossalai.utils.checkpoint_io.meta"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["colossalai"].utils = sys.modules["colossalai.utils"]
sys.modules["colossalai.utils"].checkpoint_io = sys.modules["colossalai.utils.checkpoint_io"]
sys.modules["colossalai.utils.checkpoint_io"].meta = sys.modules["colossalai.utils.checkpoint_io.meta"]


@dataclasses.dataclass
class ParamDistMeta:
    dp_rank: int
    dp_world_size: int
    tp_rank: int
    tp_world_size: int
    tp_shard_dims: list = None
    tp_num_parts: list = None
    zero_numel: int = None
    zero_orig_shape: list = None


ParamDistMeta.__module__ = "colossalai.utils.checkpoint_io.meta"
sys.modules["colossalai.utils.checkpoint_io.meta"].ParamDistMeta = ParamDistMeta

out = sys.argv[1]
os.makedirs(os.path.join(out, "ranks"), exist_ok=True)
torch.manual_seed(3)
full = {"rows": torch.randn(6, 5), "columns": torch.randn(4, 6), "norm": torch.randn(5), "cube": torch.randn(4, 3, 2)}
cut = {"rows": 0, "columns": 1, "norm": None, "cube": 0}
ids = {name: i for i, name in enumerate(full)}
moments = {name: torch.randn_like(t) for name, t in full.items()}


def local(name, tensor, tp):
    return tensor if cut[name] is None else tensor.chunk(2, cut[name])[tp].contiguous()


def part(tensor, dp):
    """ZeRO's: a third of the elements, rounded up, and the rest."""
    flat = tensor.flatten()
    at = (flat.numel() + 2) // 3
    return (flat[:at] if dp == 0 else flat[at:]).clone()


metas = []
for tp in range(2):
    for dp in range(2):
        rank = 2 * dp + tp
        model, state, placed = {}, {}, {}
        for name, tensor in full.items():
            mine = local(name, tensor, tp)
            is_cut = cut[name] is not None
            placed[name] = ParamDistMeta(dp, 2, tp, 2 if is_cut else 1, [cut[name]] if is_cut else None,
                                         [2] if is_cut else None, mine.numel(), list(mine.shape))
            if not is_cut:
                placed[name].tp_rank = 0
            model[name] = part(mine, dp)
            state[ids[name]] = {"step": 3, "exp_avg": part(local(name, moments[name], tp), dp)}
        torch.save(model, os.path.join(out, "ranks", f"model-rank{rank}-shard0.bin"))
        optim = {"state": state}
        if rank == 0:
            optim["param_groups"] = [{"lr": 0.1, "params": list(ids.values())}]
        torch.save(optim, os.path.join(out, "ranks", f"optim-rank{rank}-shard0.bin"))
        torch.save({"dist_meta": placed, "params": list(full), "param_to_os": ids,
                    "paired_os": {i: {"step": False, "exp_avg": True} for i in ids.values()},
                    "model": [f"model-rank{rank}-shard0.bin"], "optimizer": [f"optim-rank{rank}-shard0.bin"]},
                   os.path.join(out, "ranks", f"meta-rank{rank}.bin"))
        metas.append(f"meta-rank{rank}.bin")
torch.save({"meta": metas}, os.path.join(out, "ranks", "global_meta.bin"))
torch.save({"meta": ["meta-rank0.bin", "meta-rank2.bin"]}, os.path.join(out, "without_tp1.bin"))
torch.save({"meta": ["meta-rank0.bin", "meta-rank1.bin"]}, os.path.join(out, "without_dp1.bin"))
save_file({**full, **{f"optimizer.state.{n}.exp_avg": m for n, m in moments.items()}},
          os.path.join(out, "full.safetensors"))
