"""Small checkpoints of the real DeepSpeed, on CPU: ZeRO 0 to 3, BF16_Optimizer, MoE, a pipeline, universal.

    pip install torch==2.15.0 deepspeed==0.19.8 transformers==5.23.0
    python make.py OUT [NAME ...]        # NAME: a key of VARIANTS; default: all

Writes OUT/NAME/ as engine.save_checkpoint (or ds_to_universal) left it, but for the scripts that DeepSpeed copies there, with a
config.json; and what it holds as digests: NAME.hf.json the model under Hugging Face's names (NAME.full.json, where there is
none of its kind), NAME.optim.json "fp32.", "exp_avg." and "exp_avg_sq." of each parameter.

No truth is gathered from the checkpoint: every master and moment is a fixed function of its name; after a real training
step the values are written into the running engine by DeepSpeed's own safe_set_*, and then saved.
"""
import hashlib, json, os, shutil, sys, tempfile, zlib
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", DS_IGNORE_CUDA_DETECTION="1",
                  TORCH_NCCL_ASYNC_ERROR_HANDLING="0", MASTER_ADDR="127.0.0.1", TOKENIZERS_PARALLELISM="false")
import torch

TINY = dict(vocab_size=23, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False)
ODD = dict(TINY, vocab_size=21, hidden_size=6, intermediate_size=7, num_attention_heads=3)
EVEN = dict(TINY, num_key_value_heads=2)
TIED = dict(TINY, tie_word_embeddings=True)
# world, ZeRO stage, model; optional: groups (weight decay split), frozen (parts of names), zero (further options), buffers,
# moe, universal, pipe, dtype, grad_fp32 (BF16_Optimizer)
VARIANTS = {
    "z0":            dict(world=1, stage=0, model=TINY, dtype="fp32"),
    "z1_universal":  dict(world=2, stage=1, model=dict(TINY, num_hidden_layers=1), groups=True, universal=True),
    "z2_align":      dict(world=2, stage=2, model=ODD, groups=True, zero=dict(parameter_alignment=True)),
    "z2_frozen_tied": dict(world=2, stage=2, model=TIED, frozen=["layers.0.", "norm"], buffers=True),
    "z2_roundrobin": dict(world=3, stage=2, model=TINY, groups=True, zero=dict(round_robin_gradients=True)),
    "z2_fp16":       dict(world=3, stage=2, model=ODD, dtype="fp16"),
    "z2_moe":        dict(world=4, stage=2, model=dict(TINY, num_hidden_layers=3), moe=4),
    "bf16opt":       dict(world=2, stage=1, model=TINY, groups=True, grad_fp32=True),
    "z3_frozen_tied": dict(world=3, stage=3, model=TIED, groups=True, frozen=["layers.0.", "layers.1.mlp"], buffers=True),
    "z3_subgroups":  dict(world=2, stage=3, model=ODD, groups=True, zero=dict(sub_group_size=150)),
    "z3_universal":  dict(world=2, stage=3, model=dict(TINY, num_hidden_layers=1), groups=True, universal=True),
    "z2_lora":       dict(world=2, stage=2, model=dict(TINY, num_hidden_layers=1), lora=True),
    "z2_lora_alone": dict(world=2, stage=2, model=dict(TINY, num_hidden_layers=1), lora=True, alone=True),
    "z3_lora_alone": dict(world=2, stage=3, model=dict(TINY, num_hidden_layers=1), lora=True, alone=True),
    "z1_autotp":     dict(world=4, stage=1, model=EVEN, groups=True, autotp=2),
    "z2_autotp":     dict(world=4, stage=2, model=EVEN, groups=True, autotp=2),
    "z3_autotp":     dict(world=4, stage=3, model=EVEN, autotp=2),
    "pipe":          dict(world=4, stage=1, model=TINY, pipe=2),
    "pipe_tp2":      dict(world=4, stage=1, model=dict(EVEN, vocab_size=24), pipe=2, tp=2),
    "pipe_odd":      dict(world=3, stage=0, model=dict(TINY, num_hidden_layers=3), pipe=3),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def value(kind, name, shape):
    """The true content of one tensor: fixed by its kind and name alone."""
    g = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{name}".encode()))
    if kind == "fp32":
        return torch.randn(shape, generator=g) * 0.5
    if kind == "exp_avg":
        return torch.randn(shape, generator=g) * 1e-2
    return torch.rand(shape, generator=g) * 1e-4


def build_model(v):
    from transformers import LlamaConfig, LlamaForCausalLM
    cfg = LlamaConfig(**v["model"], max_position_embeddings=64, attn_implementation="eager", use_cache=False)
    torch.manual_seed(1)
    model = LlamaForCausalLM(cfg)
    if v.get("buffers"):                      # a persistent buffer: lands in buffer_names
        model.model.register_buffer("position_scale", torch.linspace(0.5, 1.5, 7))
    if v.get("lora"):
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    if v.get("moe"):
        from deepspeed.moe.layer import MoE
        class Block(torch.nn.Module):         # DeepSpeed's MoE returns a tuple
            def __init__(self, mlp, hidden):
                super().__init__()
                self.moe = MoE(hidden, mlp, num_experts=v["moe"], ep_size=2, k=1, min_capacity=4)
            def forward(self, x):
                return self.moe(x)[0]
        for i in (1, 2):
            model.model.layers[i].mlp = Block(model.model.layers[i].mlp, cfg.hidden_size)
    return model, cfg


def param_groups(model, v):
    train = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not v.get("groups"):
        return [{"params": [p for _, p in train], "weight_decay": 0.1}]
    return [{"params": [p for n, p in train if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in train if p.dim() <= 1], "weight_decay": 0.0}]


def ds_config(v):
    d = v.get("dtype", "bf16")
    zero = {"stage": v["stage"], "contiguous_gradients": bool(v.get("moe")), "overlap_comm": False, "reduce_scatter": bool(v.get("moe")),
            **({"stage3_param_persistence_threshold": 40} if v["stage"] == 3 else {}), **v.get("zero", {})}
    c = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2 if v.get("pipe") else 1,
         "zero_optimization": zero, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
         "communication_data_type": "fp32"}
    if d == "bf16": c["bf16"] = {"enabled": True}
    if d == "fp16": c["fp16"] = {"enabled": True, "initial_scale_power": 4}
    if v.get("autotp"): c["tensor_parallel"] = {"autotp_size": v["autotp"]}
    if v.get("grad_fp32"): c["data_types"] = {"grad_accum_dtype": "fp32"}
    return c


def rank_main(rank, v, ckpt, store):
    w = v["world"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(w), LOCAL_SIZE=str(w))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, w), rank=rank, world_size=w)
    import deepspeed
    from deepspeed.utils import (safe_set_full_fp32_param, safe_set_full_optimizer_state, safe_set_local_fp32_param,
                                 safe_set_local_optimizer_state)
    deepspeed.init_distributed("gloo", verbose=False)
    if v.get("pipe"):
        return pipe_main(rank, v, ckpt)
    model, cfg = build_model(v)
    named = dict(model.named_parameters())
    shapes = {n: tuple(p.shape) for n, p in named.items()}
    frozen = [n for n in named if any(f in n for f in v.get("frozen", [])) or v.get("lora") and "lora_" not in n]
    with torch.no_grad():
        for n, p in named.items():
            # experts are numbered per rank: name them globally before asking for their values
            p.copy_(value("fp32", global_name(n, v, rank), p.shape))
    for n in frozen: named[n].requires_grad_(False)
    groups = param_groups(model, v)
    if v.get("moe"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        for i, g in enumerate(groups): g["name"] = f"group{i}"
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    opt = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    names = {id(p): n for n, p in named.items()}
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config(v))
    ids = torch.arange(24).reshape(1, 24) % v["model"]["vocab_size"]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    if getattr(engine.optimizer, "_hp_optimizer_states_linked", False):
        # DeepSpeed links the state after the first group's step, when later groups have none. Link again.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    if v.get("zero", {}).get("round_robin_gradients"):
        set_flat(engine.optimizer, names)
    for n, p in engine.module.named_parameters():
        if not v.get("autotp"): n = names[id(p)]
        if n in frozen or v.get("zero", {}).get("round_robin_gradients"): continue
        gname = global_name(n, v, rank)
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            t = part_of(value(kind, gname, shapes[n]), p, v)
            if v["stage"] == 3:
                k = p.ds_tensor.numel()
                loc = torch.cat([t.flatten(), torch.zeros(k * w - t.numel())])[rank * k:(rank + 1) * k]
                if kind == "fp32": safe_set_local_fp32_param(p, loc)
                else: safe_set_local_optimizer_state(p, loc, kind)
            elif v["stage"] == 0:
                if kind == "fp32": p.data.copy_(t)
                else: opt.state[p][kind].copy_(t)
            elif kind == "fp32": safe_set_full_fp32_param(p, t)
            else: safe_set_full_optimizer_state(p, t, kind)
    o = engine.optimizer
    if v["stage"] == 3:                       # fp32 -> bf16, as at the end of a step
        o._partition_all_parameters()
        for i in range(len(o.fp16_groups)): o._reassign_or_swap_out_partitioned_parameters(i)
        if o.persistent_parameters: o.persistent_parameters[0].all_gather(o.persistent_parameters)
        for n, p in named.items():
            with deepspeed.zero.GatheredParameters([p]):
                assert torch.equal(p.data, value("fp32", n, shapes[n]).to(p.dtype)), n
    elif v["stage"]:
        o.update_lp_params()
        for n, p in engine.module.named_parameters():
            assert torch.equal(p.data, part_of(value("fp32", global_name(n, v, rank), shapes[n]), p, v).to(p.dtype)), n
    engine.save_checkpoint(ckpt, client_state={"client_note": "kept by the user", "epoch": 3},
                           exclude_frozen_parameters=bool(v.get("alone")))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def part_of(t, p, v):
    """What this tensor-parallel rank has of it, as AutoTP's own layers say."""
    meta = getattr(p, "ds_autotp_universal_checkpoint_meta", None)
    if not v.get("autotp") or not meta or meta.get("replicated") or meta.get("partition_dim") is None: return t
    from deepspeed.utils import groups
    return t.chunk(v["autotp"], meta["partition_dim"])[groups.get_tensor_model_parallel_rank()].contiguous()


def set_flat(o, names):
    """With round_robin_gradients DeepSpeed's fragment addresses are wrong (they follow the model's order, the flat
    buffers follow the round-robin order), so safe_set_* would write to wrong places: fill the flat buffers in the live
    optimizer's own order. That this is right is seen afterwards: the bf16 weights refreshed from them are compared."""
    for i, group in enumerate(o.round_robin_bit16_groups):
        mine = o.single_partition_of_fp32_groups[i]
        at = torch.distributed.get_rank(group=o.real_dp_process_group[i]) * mine.numel()
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            flat = torch.zeros(o.bit16_groups_flat[i].numel())
            whole = torch.cat([value(kind, names[id(p)], p.shape).flatten() for p in group])
            flat[:whole.numel()] = whole
            (mine.data if kind == "fp32" else o.optimizer.state[mine][kind]).copy_(flat[at:at + mine.numel()])


def global_name(n, v, rank):
    """Expert parallel size 2: rank r holds experts (r%2)*E/2 .. of the E; DeepSpeed names them locally from 0."""
    key = ".deepspeed_experts."
    if not v.get("moe") or key not in n: return n
    head, tail = n.split(key)
    i, rest = tail.split(".", 1)
    return f"{head}{key}{int(i) + (rank % 2) * v['moe'] // 2}.{rest}"


class PipeEmbed(torch.nn.Module):
    def __init__(self, v, h): super().__init__(); self.word_embeddings = torch.nn.Embedding(v, h)
    def forward(self, ids): return self.word_embeddings(ids)
class PipeBlock(torch.nn.Module):
    def __init__(self, cfg, tp):
        super().__init__()
        h, f, a, k = cfg["hidden_size"], cfg["intermediate_size"], cfg["num_attention_heads"], cfg["num_key_value_heads"]
        d = h // a
        a, k, f = a // tp, k // tp, f // tp
        lin = lambda i, o: torch.nn.Linear(i, o, bias=False)
        self.input_layernorm = torch.nn.RMSNorm(h); self.post_attention_layernorm = torch.nn.RMSNorm(h)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = lin(h, a * d), lin(h, k * d), lin(h, k * d), lin(a * d, h)
        self.gate_proj, self.up_proj, self.down_proj = lin(h, f), lin(h, f), lin(f, h)
        self.a, self.k, self.d = a, k, d
    def forward(self, x):
        b, t, _ = x.shape
        y = self.input_layernorm(x)
        q = self.q_proj(y).view(b, t, self.a, self.d).transpose(1, 2)
        k = self.k_proj(y).view(b, t, self.k, self.d).transpose(1, 2).repeat_interleave(self.a // self.k, 1)
        w = self.v_proj(y).view(b, t, self.k, self.d).transpose(1, 2).repeat_interleave(self.a // self.k, 1)
        o = torch.softmax(q @ k.transpose(-1, -2), -1) @ w
        x = x + self.o_proj(o.transpose(1, 2).reshape(b, t, -1))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(torch.nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))
class PipeHead(torch.nn.Module):
    def __init__(self, v, h): super().__init__(); self.lm_head = torch.nn.Linear(h, v, bias=False)
    def forward(self, x): return self.lm_head(x)


def pipe_layers(v, tp=1):
    """(index in the layer list, module factory, hf prefix of its parameters)"""
    m = v["model"]; out = [(PipeEmbed, (m["vocab_size"] // tp, m["hidden_size"]))]
    out += [(PipeBlock, (m, tp))] * m["num_hidden_layers"]
    out += [(torch.nn.RMSNorm, (m["hidden_size"],)), (PipeHead, (m["vocab_size"] // tp, m["hidden_size"]))]
    return out


def pipe_main(rank, v, ckpt):
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
    torch.manual_seed(1)
    m = v["model"]
    loss_fn = lambda out, lab: torch.nn.functional.cross_entropy(out.float().flatten(0, 1), lab.flatten())
    layout = {"num_stages": v["pipe"]}
    if v.get("tp"):
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
        layout = {"topology": PipeModelDataParallelTopology(num_pp=v["pipe"], num_mp=v["tp"], num_dp=1)}
    model = PipelineModule([LayerSpec(c, *a) for c, a in pipe_layers(v, v.get("tp", 1))], loss_fn=loss_fn,
                           partition_method="uniform", **layout)
    part = rank % v.get("tp", 1)              # of the pipe, model and data axes model is the last with more than one
    def value(kind, name, shape):             # this tensor-parallel rank's rows or columns
        whole = true_names(v)[0][name]
        cut = [d for d in range(len(whole)) if whole[d] != shape[d]]
        t = globals()["value"](kind, name, whole)
        return t.chunk(v["tp"], cut[0])[part].contiguous() if cut else t
    named = dict(model.named_parameters())
    with torch.no_grad():
        for n, p in named.items(): p.copy_(value("fp32", n, p.shape))
    opt = torch.optim.AdamW(param_groups(model, v), lr=1e-3, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config(v))
    ids = torch.arange(8).reshape(1, 8) % m["vocab_size"]
    engine.train_batch(iter([(ids, ids)] * 2))
    for n, p in named.items():
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            t = value(kind, n, p.shape)
            if v["stage"] == 0 and not hasattr(p, "_hp_mapping"):
                if kind == "fp32": p.data.copy_(t)
                else: opt.state[p][kind].copy_(t)
            elif kind == "fp32": safe_set_full_fp32_param(p, t)
            else: safe_set_full_optimizer_state(p, t, kind)
    if hasattr(engine.optimizer, "update_lp_params"): engine.optimizer.update_lp_params()
    for n, p in named.items():
        p.data.copy_(value("fp32", n, p.shape))
    engine.save_checkpoint(ckpt, client_state={"client_note": "kept by the user"})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def true_names(v):
    """name -> shape of every parameter of the unsharded model, under the names the checkpoint uses"""
    if v.get("pipe"):
        out = {}
        for i, (c, a) in enumerate(pipe_layers(v)):
            for n, p in c(*a).named_parameters(): out[f"{i}.{n}"] = tuple(p.shape)
        return out, {}
    plain = {k: x for k, x in v.items() if k != "moe"}
    model, _ = build_model(plain)
    out = {n: tuple(p.shape) for n, p in model.named_parameters()}
    if v.get("moe"):
        moe = {}
        for n, s in out.items():
            if any(f"layers.{i}.mlp." in n for i in (1, 2)):
                head, tail = n.split(".mlp.")
                for e in range(v["moe"]):
                    moe[f"{head}.mlp.moe.deepspeed_moe.experts.deepspeed_experts.{e}.{tail}"] = s
                moe[f"{head}.mlp.moe.deepspeed_moe.gate.wg.weight"] = (v["moe"], v["model"]["hidden_size"])
            else: moe[n] = s
        out = moe
    return out, {n: b for n, b in model.named_buffers() if v.get("buffers") and n == "model.position_scale"}


def hf_name(n):
    """pipeline names -> Hugging Face names"""
    i, rest = n.split(".", 1); return int(i), rest


def digests(tensors):
    return {n: [{"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}[str(t.dtype)], list(t.shape),
                hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()] for n, t in sorted(tensors.items())}


def write(path, rows):
    with open(path, "w") as f:
        f.write("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(x)}" for k, x in rows.items()) + "\n}\n")


def make(name, out):
    v = VARIANTS[name]
    dst = os.path.join(out, name)
    shutil.rmtree(dst, ignore_errors=True)
    store, ckpt = tempfile.mktemp(), tempfile.mkdtemp() if v.get("universal") else dst
    os.environ["MASTER_PORT"] = str(29500 + zlib.crc32(name.encode()) % 2000)
    import deepspeed, transformers, transformers.models.llama.modeling_llama      # slow imports, then fork
    torch.multiprocessing.start_processes(rank_main, args=(v, ckpt, store), nprocs=v["world"], start_method="fork")
    if os.path.exists(store): os.remove(store)
    if v.get("universal"): universal(dst, ckpt)
    shapes, buffers = true_names(v)
    dt = DTYPES[v.get("dtype", "bf16")]
    full = {n: value("fp32", n, s).to(dt) for n, s in shapes.items()}
    full.update({n: b.clone() for n, b in buffers.items()})     # DeepSpeed casts the parameters, not the buffers
    frozen = [n for n in shapes if any(f in n for f in v.get("frozen", [])) or v.get("lora") and "lora_" not in n]
    optim = {f"{k}.{n}": value(k, n, s) for n, s in shapes.items() if n not in frozen
             for k in ("fp32", "exp_avg", "exp_avg_sq") if not (v.get("dtype") == "fp32" and k == "fp32")}
    tied = bool(v["model"].get("tie_word_embeddings"))
    if tied: full["lm_head.weight"] = full["model.embed_tokens.weight"].clone()
    hf = {n: t for n, t in full.items() if n not in buffers and "deepspeed_moe" not in n}
    if v.get("pipe"):
        L = v["model"]["num_hidden_layers"]; hf = {}
        for n, t in full.items():
            i, rest = hf_name(n)
            if i == 0: h = "model.embed_tokens.weight"
            elif i <= L:
                part = rest.split(".")[0]
                mid = {"q": "self_attn.", "k": "self_attn.", "v": "self_attn.", "o": "self_attn.", "gate": "mlp.",
                       "up": "mlp.", "down": "mlp."}.get(part.split("_")[0] if part.endswith("_proj") else "", "")
                h = f"model.layers.{i - 1}.{mid}{rest}"
            else: h = {L + 1: "model.norm.weight", L + 2: "lm_head.weight"}[i]
            hf[h] = t
    if tied: hf.pop("lm_head.weight")
    write(f"{dst}.optim.json", digests(optim))
    if v.get("moe"):
        write(f"{dst}.full.json", digests(full))
    else:
        write(f"{dst}.hf.json", digests(hf))
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **v["model"],
                   "head_dim": v["model"]["hidden_size"] // v["model"]["num_attention_heads"],
                   "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
                   "attention_bias": False, "mlp_bias": False, "torch_dtype": str(dt)[6:]},
                  open(f"{dst}/config.json", "w"), indent=1)
    for f in ("zero_to_fp32.py", "zero_to_torch.py"):
        if os.path.exists(f"{dst}/{f}"): os.remove(f"{dst}/{f}")


def universal(u, ckpt):
    import subprocess
    tag = open(f"{ckpt}/latest").read().strip()
    os.makedirs(u)
    env = dict(os.environ)
    for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"): env.pop(k, None)
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", f"{ckpt}/{tag}",
                    "--output_folder", f"{u}/{tag}_universal", "--inject_missing_state", "--num_extract_workers", "1",
                    "--num_merge_workers", "1"], check=True, env=env)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or VARIANTS:
        make(name, sys.argv[1])
