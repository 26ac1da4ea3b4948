"""Makes the files next to it with real torch (2.15): python make.py DIRECTORY

Each state is saved twice: by torch.save (NAME.pt) and by torch.distributed.checkpoint (NAME). The second has the
elements of the set in another order, because 0 and 8 have the same hash modulo the size of a small table."""
import os
import sys

import torch
import torch.distributed.checkpoint as dcp

out = sys.argv[1]
model = {"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)}


def adam(lr):
    state = {"a.weight": {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2)}}
    return {"state": state, "param_groups": [{"lr": lr, "betas": (0.9, 0.99), "amsgrad": False}]}


def states(tags):
    run = {"seen": (b"\x00\xff", b"", 1 << 70, None), "model": model}
    return {
        # Without an optimizer, all tensors of the file are the model's.
        "weights": {"model": model, "step": 7, "tags": tags},
        "weights_step8": {"model": model, "step": 8, "tags": tags},
        "weights_epoch": {"model": model, "step": 7, "tags": tags, "epoch": 1},
        "run": {**run, "optim": adam(0.1)},
        "run_lr": {**run, "optim": adam(0.2)},
        "model": {"model": model},
    }


for name, state in states({0, 8}).items():
    torch.save(state, os.path.join(out, name + ".pt"))
for name, state in states({8, 0}).items():
    dcp.save(state, checkpoint_id=os.path.join(out, name), no_dist=True)
