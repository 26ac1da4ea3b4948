"""Small checkpoints of DeepSpeed's AutoEP, on CPU: transformers' Qwen3-MoE, whose experts DeepSpeed divides among ranks.

    pip install torch==2.15.0 deepspeed==0.19.8 transformers==5.24.0
    python make_autoep.py OUT [NAME ...]        # NAME: a key of VARIANTS; default: all

Writes OUT/NAME/ as engine.save_checkpoint left it, with a config.json; and what it holds as digests: NAME.hf.json the model
under Hugging Face's names, from the parameters in the engines' memory; NAME.optim.json "fp32.", "exp_avg." and "exp_avg_sq."
of each parameter, from the ranks' vectors, which are put together here.
"""
import contextlib, glob, json, math, os, re, shutil, sys, tempfile
import make
from make import digests, write
import torch

CONFIG = dict(vocab_size=23, hidden_size=8, intermediate_size=12, moe_intermediate_size=6, num_hidden_layers=1,
              num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts=4, num_experts_per_tok=2,
              tie_word_embeddings=False, max_position_embeddings=64)
RANKS, EXPERT_RANKS = 4, 2
VARIANTS = {"z2_autoep": 2, "z3_autoep": 3}  # ZeRO's stages
HF = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def rank_main(rank, stage, ckpt, store):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS),
                      LOCAL_WORLD_SIZE=str(RANKS))
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, RANKS), rank=rank,
                                         world_size=RANKS)
    import deepspeed
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    import transformers.utils.output_capturing as capturing
    # DeepSpeed 0.19.8 calls the registry's get as a dict's.
    capturing._CanRecordRegistry.get = lambda self, key, default=None: dict.get(
        self, key if isinstance(key, str) else str(key.__class__), default) or {}
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG, attn_implementation="eager", use_cache=False))
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
              "communication_data_type": "fp32", "steps_per_print": 10**9, "zero_force_ds_cpu_optimizer": False,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
              "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": False,
                                    "reduce_scatter": True, "stage3_param_persistence_threshold": 10},
              "expert_parallel": {"enabled": True, "autoep_size": EXPERT_RANKS, "preset_model": "qwen3_moe",
                                  "use_grouped_mm": False}}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    ids = torch.randint(0, 23, (1, 8), generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    held = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p]) if hasattr(p, "ds_id") else contextlib.nullcontext():
            held[name] = p.data.detach().clone()
    torch.save(held, f"{ckpt}/held_{rank}.pt")
    engine.save_checkpoint(ckpt)
    torch.distributed.barrier()
    os._exit(0)


def by_expert(name, tensor, part):
    """An expert's own tensors of a stack that a rank holds, by their names in the checkpoint."""
    if ".experts." not in name:
        return {name: tensor}
    return {f"{name}.{part * len(tensor) + i}": t for i, t in enumerate(tensor)}


def hf_name(name):
    name = name.replace(".router.gate.", ".gate.")
    return re.sub(r"experts\.(w\d)\.(\d+)$", lambda m: f"experts.{m[2]}.{HF[m[1]]}.weight", name)


def states_of(ckpt):
    load = lambda pattern: [torch.load(p, weights_only=False) for p in sorted(glob.glob(f"{ckpt}/global_step1/{pattern}"))]
    shapes = load("*mp_rank_00_model_states.pt")[-1]["param_shapes"]
    ranks = [r["optimizer_state_dict"] for r in load("*optim_states.pt")]
    third = "fp32_flat_groups" in ranks[0]
    out = {}
    for g, group in enumerate(shapes):
        cuts = ranks[0]["ds_zero_partition_groups"][g]["partition_count"] if third else ranks[0]["partition_count"][g]
        parts = RANKS // cuts
        for part in range(parts):
            for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                if kind == "fp32":
                    vectors = [r["fp32_flat_groups" if third else "single_partition_of_fp32_groups"][g] for r in ranks[part::parts]]
                else:
                    vectors = [r["optimizer_state_dict" if third else "base_optimizer_state"]["state"][g][kind]
                               for r in ranks[part::parts]]
                at = 0
                for name, shape in group.items():
                    n = math.prod(shape)
                    each = -(-n // cuts) if third else n
                    flat = torch.cat([v[at:at + each] for v in vectors])[:n] if third else torch.cat(vectors)[at:at + n]
                    at += each
                    for key, t in by_expert(name, flat.reshape(tuple(shape)), part).items():
                        out[f"{kind}.{key}"] = t.clone()
    return out


def make_one(name, out):
    dst, store = os.path.join(out, name), tempfile.mktemp()
    shutil.rmtree(dst, ignore_errors=True)
    os.makedirs(dst)
    os.environ["MASTER_PORT"] = str(29700 + VARIANTS[name])
    import deepspeed, transformers.models.qwen3_moe.modeling_qwen3_moe      # slow imports, then fork
    torch.multiprocessing.start_processes(rank_main, args=(VARIANTS[name], dst, store), nprocs=RANKS, start_method="fork")
    model = {}
    for rank in range(RANKS):
        held = torch.load(f"{dst}/held_{rank}.pt")
        os.remove(f"{dst}/held_{rank}.pt")
        for key, t in held.items():
            for k, v in by_expert(key, t, rank % EXPERT_RANKS).items(): model[hf_name(k)] = v.clone()
    write(f"{dst}.hf.json", digests(model))
    write(f"{dst}.optim.json", digests(states_of(dst)))
    json.dump({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **CONFIG, "torch_dtype": "bfloat16"},
              open(f"{dst}/config.json", "w"), indent=1)
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        if os.path.exists(f"{dst}/{script}"): os.remove(f"{dst}/{script}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or VARIANTS:
        make_one(name, sys.argv[1])
