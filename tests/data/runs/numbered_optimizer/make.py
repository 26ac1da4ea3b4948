"""A model and torch's own optimizer state, as transformers' Trainer saves them side by side (two groups: weight decay for
matrices, none for vectors), and the state that one of two tensor-parallel ranks has. Made with torch 2.x: make.py"""
import os
import torch
from safetensors.torch import save_file

SHAPES = {"model.embed_tokens.weight": (12, 8), "model.layers.0.self_attn.q_proj.weight": (8, 8),
          "model.layers.0.self_attn.o_proj.weight": (8, 8), "model.layers.0.mlp.up_proj.weight": (20, 8),
          "model.layers.0.input_layernorm.weight": (8,), "model.norm.weight": (8,), "lm_head.weight": (12, 8)}
CUT = {"q_proj": 0, "o_proj": 1, "up_proj": 0}

def shape_of(name, ranks):
    shape = list(SHAPES[name])
    for module, dim in CUT.items():
        if module in name:
            shape[dim] //= ranks
    return shape

def state(ranks, names=tuple(SHAPES)):
    torch.manual_seed(1)
    parameters = {n: torch.nn.Parameter(torch.randn(shape_of(n, ranks))) for n in names}
    groups = [{"params": [p for p in parameters.values() if p.dim() == d], "weight_decay": w} for d, w in ((2, 0.1), (1, 0.0))]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for p in parameters.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return parameters, optimizer.state_dict()

here = os.path.dirname(os.path.abspath(__file__))
parameters, right = state(1)
save_file({n: p.detach().contiguous() for n, p in parameters.items()}, f"{here}/model.safetensors", {"format": "pt"})
torch.save(right, f"{here}/whole.pt")
torch.save(state(2)[1], f"{here}/one_of_two.pt")

# A head that is tied to the embedding is one parameter with it, and has a name of its own in torch.save's file.
parameters, tied = state(1, [n for n in SHAPES if n != "lm_head.weight"])
tensors = {n: p.detach() for n, p in parameters.items()}
torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, f"{here}/tied_model.bin")
torch.save(tied, f"{here}/tied.pt")
