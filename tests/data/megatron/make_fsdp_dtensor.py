"""Small checkpoints named as Megatron-FSDP names them with --ckpt-format fsdp_dtensor, of a gated dense model and of experts.

    pip install torch==2.15.0 numpy
    python make_fsdp_dtensor.py OUT

The names follow megatron/core/transformer/fsdp_dtensor_checkpoint.py (the halves _w and _v of a gated linear_fc1) and
megatron/core/optimizer/distrib_optimizer.py (sharded_param_state_fsdp_dtensor), of Megatron core 0.16.1; torch's own DCP
writes them. Megatron-FSDP itself needs GPUs and did not run. Beside each checkpoint: NAME.hf.json, digests of the model
under Hugging Face's names, and NAME.optim.json, of fp32, exp_avg and exp_avg_sq of each parameter under the same names.
"""
import hashlib, json, sys, zlib
import torch, torch.distributed.checkpoint as dcp

H, I, V, HEADS, KV, LAYERS, EXPERTS = 8, 6, 20, 2, 1, 2, 2
DENSE = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=H, intermediate_size=I, vocab_size=V,
             num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=LAYERS, tie_word_embeddings=False,
             torch_dtype="float32", rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=64)
MOE = DENSE | dict(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=EXPERTS,
                   num_experts_per_tok=1)


def value(kind, name, *shape):
    g = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{name}".encode()))
    return torch.rand(shape, generator=g) * 1e-4 if kind == "exp_avg_sq" else torch.randn(shape, generator=g)


def model(kind, has_experts):
    """Hugging Face's tensors, and Megatron's of the same numbers."""
    hf, mg = {}, {}

    def same(name, core, *shape):
        hf[name] = mg[core] = value(kind, name, *shape)

    same("model.embed_tokens.weight", "embedding.word_embeddings.weight", V, H)
    same("model.norm.weight", "decoder.final_layernorm.weight", H)
    same("lm_head.weight", "output_layer.weight", V, H)
    d = H // HEADS
    for i in range(LAYERS):
        a, b = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (value(kind, a + f"self_attn.{x}_proj.weight", n * d, H) for x, n in (("q", HEADS), ("k", KV), ("v", KV)))
        hf |= {a + f"self_attn.{x}_proj.weight": t for x, t in (("q", q), ("k", k), ("v", v))}
        mg[b + "self_attention.linear_qkv.weight"] = torch.cat(
            [t.chunk(KV)[g] for g in range(KV) for t in (q, k, v)])
        same(a + "self_attn.o_proj.weight", b + "self_attention.linear_proj.weight", H, H)
        same(a + "input_layernorm.weight", b + "self_attention.linear_qkv.layer_norm_weight", H)
        if not has_experts:
            same(a + "post_attention_layernorm.weight", b + "mlp.linear_fc1.layer_norm_weight", H)
            same(a + "mlp.gate_proj.weight", b + "mlp.linear_fc1.weight_w", I, H)
            same(a + "mlp.up_proj.weight", b + "mlp.linear_fc1.weight_v", I, H)
            same(a + "mlp.down_proj.weight", b + "mlp.linear_fc2.weight", H, I)
            continue
        same(a + "post_attention_layernorm.weight", b + "pre_mlp_layernorm.weight", H)
        same(a + "block_sparse_moe.gate.weight", b + "mlp.router.weight", EXPERTS, H)
        for e in range(EXPERTS):
            moe = a + f"block_sparse_moe.experts.{e}."
            one = i == 0  # a layer of SequentialMLP, and one of TEGroupedMLP
            fc1 = b + (f"mlp.experts.local_experts.{e}.linear_fc1.weight" if one else f"mlp.experts.linear_fc1.weight{e}")
            fc2 = b + (f"mlp.experts.local_experts.{e}.linear_fc2.weight" if one else f"mlp.experts.linear_fc2.weight{e}")
            same(moe + "w1.weight", fc1 + "_w", I, H)
            same(moe + "w3.weight", fc1 + "_v", I, H)
            same(moe + "w2.weight", fc2, H, I)
    return hf, mg


def digests(tensors):
    return {n: ["F32", list(t.shape), hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()]
            for n, t in sorted(tensors.items())}


def write(path, rows):
    with open(path, "w") as f:
        f.write("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(x)}" for k, x in rows.items()) + "\n}\n")


for name, config in (("fsdp_dtensor", DENSE), ("fsdp_dtensor_moe", MOE)):
    truth, held, state = {}, None, {}
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        hf, mg = model(kind, config is MOE)
        truth |= {f"{kind}.{n}": t for n, t in hf.items()}
        if kind == "fp32":
            weights, held = hf, mg
            continue
        for n, t in mg.items():
            state.setdefault("module.module." + n, {"step": torch.tensor(3.0)})[kind] = t
    # The groups' options are stored by parameter, not by half.
    metas = {n.removesuffix("_w"): dict(lr=0.001, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1 if t.dim() > 1 else 0.0)
             for n, t in held.items() if not n.endswith("_v")}
    root = f"{sys.argv[1]}/{name}"
    dcp.save({"model": {"module." + n: t for n, t in held.items()},
              "optimizer": {"state": state, "param_to_group_meta": {"module.module." + n: m for n, m in metas.items()}},
              "iteration": 3}, checkpoint_id=f"{root}/iter_0000003", no_dist=True)
    with open(f"{root}/iter_0000003/config.json", "w") as f:
        json.dump(config, f, indent=2)
    write(f"{root}.hf.json", digests(weights))
    write(f"{root}.optim.json", digests(truth))
