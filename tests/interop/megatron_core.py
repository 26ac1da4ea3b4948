"""Loads a torch_dist directory with Megatron core's own dist_checkpointing, at any degrees, and compares every rank's
parameters with a Hugging Face model's.

    python megatron_core.py DIRECTORY HF_DIRECTORY TP PP [EP]

DIRECTORY has latest_checkpointed_iteration.txt. Megatron core wants a GPU; for loading, what it asks of CUDA here is a
stand-in that does nothing, and the modules are Megatron's own (the local spec), without Transformer Engine.
"""
import json
import os
import pathlib
import sys
import tempfile
from unittest.mock import MagicMock

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", CUDA_DEVICE_MAX_CONNECTIONS="1")
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file


class CpuForCuda(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        if getattr(function, "__name__", "") == "cuda":
            return args[0]
        return function(*args, **kwargs)


def without_cuda():
    cuda = torch.cuda
    state = torch.get_rng_state()
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 1
    for name in ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_device", "set_rng_state"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.get_rng_state = lambda *args, **kwargs: state
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.Stream = cuda.Event = MagicMock()


def padded(tensor, rows):
    """Rows beyond the vocabulary are the last word's again."""
    return torch.cat([tensor, tensor[-1:].expand(rows - tensor.shape[0], -1)])


def qkv(hf, prefix, word, config):
    """For each key-value head its query heads, the key, the value."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (hf[f"{prefix}self_attn.{n}_proj.{word}"] for n in "qkv")
    out = []
    for g in range(groups):
        out += [q.chunk(groups)[g], k.chunk(groups)[g], v.chunk(groups)[g]]
    assert q.shape[0] % heads == 0
    return torch.cat(out)


def expected(hf, config, name, padded_rows):
    """The whole tensor of Megatron's parameter, numbered through, and how tensor parallelism cuts it."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tied = config.get("tie_word_embeddings") or name.startswith("embedding")
        return padded(hf["model.embed_tokens.weight" if tied else "lm_head.weight"], padded_rows), "rows"
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"], None
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    simple = {"self_attention.linear_proj.weight": ("self_attn.o_proj.weight", "columns"),
              "input_layernorm.weight": ("input_layernorm.weight", None),
              "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
              "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
              "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
              "mlp.linear_fc2.weight": ("mlp.down_proj.weight", "columns")}
    if rest in simple:
        word, cut = simple[rest]
        return hf[prefix + word], cut
    if rest.startswith("self_attention.linear_qkv."):
        return qkv(hf, prefix, rest.rpartition(".")[2], config), "rows"
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([hf[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up")]), "gated"
    mixtral = config["model_type"] == "mixtral"
    if rest == "mlp.router.weight":
        return hf[prefix + ("block_sparse_moe.gate.weight" if mixtral else "mlp.gate.weight")], None
    _, _, _, expert, matrix, _ = rest.split(".")  # mlp.experts.local_experts.E.linear_fc1.weight
    words = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (hf[f"{prefix}{'block_sparse_moe' if mixtral else 'mlp'}.experts.{expert}.{n}.weight"] for n in words)
    return (torch.cat([gate, up]), "gated") if matrix == "linear_fc1" else (down, "columns")


def local(tensor, cut, rank, ranks):
    if cut is None:
        return tensor
    if cut == "gated":
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(ranks, 1 if cut == "columns" else 0)[rank]


def build(config, args, tp, pp, ep):
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import TransformerConfig
    experts = getattr(args, "num_experts", None)
    of_experts = dict(num_moe_experts=experts, moe_ffn_hidden_size=args.moe_ffn_hidden_size,
                      moe_router_topk=args.moe_router_topk, moe_token_dispatcher_type="alltoall",
                      expert_model_parallel_size=ep, expert_tensor_parallel_size=1) if experts else {}
    settings = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads, num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels, add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm, normalization=args.normalization, gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True, params_dtype=torch.bfloat16, bf16=True,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        gradient_accumulation_fusion=False, persist_layer_norm=False, **of_experts)
    spec = (specs.get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization="RMSNorm") if experts
            else specs.get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=args.qk_layernorm))
    return GPTModel(config=settings, transformer_layer_spec=spec, vocab_size=args.padded_vocab_size,
                    max_sequence_length=64, pre_process=mpu.is_pipeline_first_stage(),
                    post_process=mpu.is_pipeline_last_stage(),
                    share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                    position_embedding_type=args.position_embedding_type).bfloat16()


def numbered_through(model, name, ep_rank):
    if not name.startswith("decoder.layers."):
        return name
    _, _, layer, rest = name.split(".", 3)
    if ".local_experts." in rest:
        head, _, tail = rest.partition(".local_experts.")
        expert, _, tail = tail.partition(".")
        number = int(expert) + ep_rank * len(model.decoder.layers[int(layer)].mlp.experts.local_experts)
        rest = f"{head}.local_experts.{number}.{tail}"
    return f"decoder.layers.{model.decoder.layers[int(layer)].layer_number - 1}.{rest}"


def rank_main(rank, ranks, store, root, hf_directory, tp, pp, ep):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    without_cuda()
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core import parallel_state as mpu
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks)
    with CpuForCuda():
        of_experts = dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=1) if ep else {}
        mpu.initialize_model_parallel(tp, pp, **of_experts)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        latest = (root / "latest_checkpointed_iteration.txt").read_text()
        directory = str(root / (latest if latest == "release" else f"iter_{int(latest):07d}"))
        common = dist_checkpointing.load_common_state_dict(directory)
        config = json.loads((hf_directory / "config.json").read_text())
        hf = load_file(hf_directory / "model.safetensors")
        model = build(config, common["args"], tp, pp, ep or 1)
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        state = dist_checkpointing.load(state, directory)
        model.load_state_dict(state["model"])
        count = 0
        for name, parameter in model.named_parameters():
            whole = numbered_through(model, name, mpu.get_expert_model_parallel_rank() if ep else 0)
            tensor, cut = expected(hf, config, whole, common["args"].padded_vocab_size)
            ranks_of, rank_of = (1, 0) if ".experts." in name else (tp, mpu.get_tensor_model_parallel_rank())
            wanted = local(tensor, cut, rank_of, ranks_of)
            assert parameter.shape == wanted.shape, f"{name}: {list(parameter.shape)}, expected {list(wanted.shape)}"
            assert torch.equal(parameter, wanted.to(parameter.dtype)), f"{name} differs on rank {rank} of {ranks}"
            count += 1
        assert count > 5
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    root, hf_directory = map(pathlib.Path, sys.argv[1:3])
    tp, pp, *rest = map(int, sys.argv[3:])
    ep = rest[0] if rest else 0
    ranks = pp * max(tp, ep)
    import megatron.core.models.gpt.gpt_layer_specs  # once, before the ranks are made
    with tempfile.TemporaryDirectory() as directory:
        arguments = (ranks, os.path.join(directory, "store"), root, hf_directory, tp, pp, ep)
        mp.start_processes(rank_main, arguments, nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
