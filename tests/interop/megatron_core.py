"""Loads a torch_dist directory with Megatron core's own dist_checkpointing, at any degrees, or files of ranks as
Megatron-LM does (load_state_dict of what torch.load gives), and compares every rank's parameters with a Hugging Face
model's; its optimizer's moments and masters, too, where HF_DIRECTORY has optimizer.safetensors (fp32.NAME,
exp_avg.NAME, exp_avg_sq.NAME) and groups.json ({"step": ..., "lr": ...}).

    python megatron_core.py

reads a JSON list from each line of its input, [DIRECTORY, HF_DIRECTORY, "TPxPP[xEP[xDP]]", ...], and answers each with a
line, "answer: " and the error as a JSON string, which is empty if the check passes.

DIRECTORY has latest_checkpointed_iteration.txt. Files of ranks are of the degrees that they were written for, the
experts' tp being the others'. Those for Transformer Engine's modules get the names of Megatron core's own by its table
of both. Megatron core wants a GPU; for loading, what it asks of CUDA here is a
stand-in that does nothing, and the modules are Megatron's own (the local spec), without Transformer Engine.
"""
import faulthandler
import json
import os
import pathlib
import re
import sys
import tempfile
import traceback
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
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "to":
            args = tuple("cpu" if isinstance(a, (str, torch.device)) else a for a in args)
        out = function(*args, **kwargs)
        if name == "type" and isinstance(out, str):  # which the optimizers ask for
            out = out.replace("torch.", "torch.cuda.", 1)
        return out


def without_cuda():
    cuda = torch.cuda
    state = torch.get_rng_state()
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 1
    for name in ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_device", "set_rng_state"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.get_rng_state = lambda *args, **kwargs: state
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.stream = MagicMock()


def padded(tensor, rows, zeros=False):
    """Rows beyond the vocabulary are the last word's again; of moments zeros."""
    return torch.cat([tensor, (tensor[-1:] * (not zeros)).expand(rows - tensor.shape[0], -1)])


def qkv(hf, prefix, word, config):
    """For each key-value head its query heads, the key, the value."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (hf[f"{prefix}self_attn.{n}_proj.{word}"] for n in "qkv")
    out = []
    for g in range(groups):
        out += [q.chunk(groups)[g], k.chunk(groups)[g], v.chunk(groups)[g]]
    assert q.shape[0] % heads == 0
    return torch.cat(out)


def expected(hf, config, name, padded_rows, zeros=False):
    """The whole tensor of Megatron's parameter, numbered through, and how tensor parallelism cuts it."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tied = config.get("tie_word_embeddings") or name.startswith("embedding")
        return padded(hf["model.embed_tokens.weight" if tied else "lm_head.weight"], padded_rows, zeros), "rows"
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


def experts_tp(args):
    return getattr(args, "expert_tensor_parallel_size", 1)


def build(config, args, tp, pp, ep):
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import TransformerConfig
    experts = getattr(args, "num_experts", None)
    of_experts = dict(num_moe_experts=experts, moe_ffn_hidden_size=args.moe_ffn_hidden_size,
                      moe_router_topk=args.moe_router_topk, moe_token_dispatcher_type="alltoall",
                      expert_model_parallel_size=ep, expert_tensor_parallel_size=experts_tp(args)) if experts else {}
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


class FusedAdam(torch.optim.AdamW):
    """As Transformer Engine's, without which Megatron does not load its own: the step is the group's."""

    def __init__(self, *args, adam_w_mode=True, **kwargs):
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["step"] = 0

    def __setstate__(self, state):
        torch.optim.Optimizer.__setstate__(self, state)

    def _accelerator_graph_capture_health_check(self):
        """There is no GPU, whatever without_cuda() says."""

    _cuda_graph_capture_health_check = _accelerator_graph_capture_health_check

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                self.state[parameter].pop("step", None)


def with_optimizer(model, is_distributed, is_fused):
    """Megatron's distributed optimizer, or its plain one; with torch's Adam, or one that counts as others do."""
    import megatron.core.optimizer as package
    import megatron.core.optimizer.distrib_optimizer as distributed
    if is_fused:
        package.Adam, package.USING_PYTORCH_OPTIMIZER = FusedAdam, False
        distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_TE_OPTIMIZER = FusedAdam, True, True
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes as defaults
    from megatron.core.transformer.module import Float16Module
    for parameter in model.parameters():
        defaults(parameter)
    how = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed, overlap_grad_reduce=False,
                                        grad_reduce_in_fp32=True, bucket_size=None)
    chunk = DistributedDataParallel(model.config, how, Float16Module(model.config, model), disable_bucketing=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=0.5, min_lr=0.25, weight_decay=0.75, bf16=True, clip_grad=0.0, params_dtype=torch.bfloat16,
        log_num_zeros_in_grad=False, use_distributed_optimizer=is_distributed), [chunk])
    if is_distributed:
        for parameter in model.parameters():  # so that there is state to load into
            parameter.main_grad.zero_()
        optimizer.step()
    return optimizer


def local_states(one):
    """Each parameter of an optimizer, its main copy, and what of it is this rank's."""
    if hasattr(one, "model_param_group_index_map"):
        for parameter, (group, place) in one.model_param_group_index_map.items():
            span = one._get_model_param_range_map(parameter)["param"]
            yield parameter, one.optimizer.param_groups[group]["params"][place], slice(span.start, span.end)
    else:
        for halves, mains in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(halves, mains, strict=True):
                yield parameter, main, slice(None)


def check_optimizer(optimizer, wholes, truth, groups):
    """That each rank's shard of every state is that of the truth. `wholes` gives each parameter's part of the rank."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    count = 0
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        for parameter, main, mine in local_states(one):
            for kind, state in (("fp32", main), *((k, inner.state[main][k]) for k in ("exp_avg", "exp_avg_sq"))):
                wanted = wholes(parameter, truth[kind], kind != "fp32").flatten()[mine]
                assert state.dtype == torch.float32 and torch.equal(state.flatten(), wanted), f"{kind} differs"
                count += 1
            assert inner.state[main].get("step", groups["step"]) == groups["step"]
        for group in inner.param_groups:
            assert group.get("step", groups["step"]) == groups["step"] and group["lr"] == groups["lr"] and tuple(group["betas"]) == tuple(groups["betas"]), group
            assert group["weight_decay"] == groups["weight_decay"] * group["wd_mult"], group
    assert count > 10
    return OptimizerParamScheduler(optimizer, 0.0, 0.5, 0.25, 0, 20, "linear", 0.1, 0.1, 20, "constant",
                                   use_checkpoint_opt_param_scheduler=True, override_opt_param_scheduler=False)


def as_own(model, state):
    """Under the names of Megatron core's own modules: norms the other way round as they are renamed for torch_dist."""
    out = {}
    for name, value in state.items():
        if name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            for own, shared in model.decoder.layers[int(layer)].submodules_config.sharded_state_dict_keys_map.items():
                if rest.startswith(shared):
                    rest = own + rest[len(shared):]
            grouped = re.fullmatch(r"mlp\.experts\.(linear_fc\d)\.(\w+?)(\d+)", rest)
            if grouped:
                rest = "mlp.experts.local_experts.{2}.{0}.{1}".format(*grouped.groups())
            name = f"decoder.layers.{layer}.{rest}"
        if not name.endswith(("core_attention._extra_state", "mlp.experts.linear_fc1._extra_state",
                              "mlp.experts.linear_fc2._extra_state")):
            out[name] = value
    return out


class Sharded:
    """torch_dist."""

    def __init__(self, directory):
        from megatron.core import dist_checkpointing
        self.directory, self.common = directory, dist_checkpointing.load_common_state_dict(directory)
        self.args = self.common["args"]

    def load(self, model, has_optimizer):
        from megatron.core import dist_checkpointing
        from megatron.core import parallel_state as mpu
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=self.common)
        optimizer = with_optimizer(model, True, True) if has_optimizer else None
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        if has_optimizer:
            metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
            state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=metadata)
        state = dist_checkpointing.load(state, self.directory)
        model.load_state_dict(state["model"])
        if has_optimizer:
            optimizer.load_state_dict(state["optimizer"])
        return optimizer


class FilesOfRanks:
    """--ckpt-format torch."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.args = self.read(sorted(self.directory.iterdir())[0])["args"]

    @staticmethod
    def read(directory):
        return torch.load(directory / "model_optim_rng.pt", map_location="cpu", weights_only=False)

    def load(self, model, has_optimizer):
        from megatron.core import parallel_state as mpu
        name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
        if mpu.get_expert_model_parallel_world_size() > 1:
            name += f"_{mpu.get_expert_model_parallel_rank():03d}"
        self.common = self.read(self.directory / name)
        is_own = self.args.transformer_impl == "local"
        model.load_state_dict(self.common["model"] if is_own else as_own(model, self.common["model"]))
        if has_optimizer:
            optimizer = with_optimizer(model, False, not is_own)
            optimizer.load_state_dict(self.common["optimizer"])
            return optimizer


def rank_main(rank, ranks, store, root, hf_directory, tp, pp, ep):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    without_cuda()
    from megatron.core import tensor_parallel
    from megatron.core import parallel_state as mpu
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks)
    with CpuForCuda():
        saved = reader_of(root)
        etp = experts_tp(saved.args)
        of_experts = dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp) if ep else {}
        mpu.initialize_model_parallel(tp, pp, **of_experts)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = json.loads((hf_directory / "config.json").read_text())
        hf = load_file(hf_directory / "model.safetensors")
        model = build(config, saved.args, tp, pp, ep or 1)
        has_state = (hf_directory / "optimizer.safetensors").exists()
        optimizer = saved.load(model, has_state)
        names = {parameter: name for name, parameter in model.named_parameters()}

        def part_of(parameter, tensors, zeros=False):
            name = names[parameter]
            whole = numbered_through(model, name, mpu.get_expert_model_parallel_rank() if ep else 0)
            tensor, cut = expected(tensors, config, whole, saved.args.padded_vocab_size, zeros)
            ranks_of = etp if ".experts." in name else tp
            return local(tensor, cut, mpu.get_tensor_model_parallel_rank() % ranks_of, ranks_of)

        count = 0
        for name, parameter in model.named_parameters():
            wanted = part_of(parameter, hf)
            assert parameter.shape == wanted.shape, f"{name}: {list(parameter.shape)}, expected {list(wanted.shape)}"
            assert torch.equal(parameter, wanted.to(parameter.dtype)), f"{name} differs on rank {rank} of {ranks}"
            count += 1
        assert count > 5
        if has_state:
            groups = json.loads((hf_directory / "groups.json").read_text())
            truth = {}
            for name, tensor in load_file(hf_directory / "optimizer.safetensors").items():
                kind, _, parameter = name.partition(".")
                truth.setdefault(kind, {})[parameter] = tensor
            scheduler = check_optimizer(optimizer, part_of, truth, groups)
            scheduler.load_state_dict(saved.common["opt_param_scheduler"])
            assert saved.common["iteration"] == groups["step"]
            assert optimizer.param_groups[0]["lr"] == groups["lr"]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def reader_of(root):
    latest = (root / "latest_checkpointed_iteration.txt").read_text()
    directory = root / (latest if latest == "release" else f"iter_{int(latest):07d}")
    return Sharded(str(directory)) if (directory / "metadata.json").exists() else FilesOfRanks(directory)


def check(root, hf_directory, cases):
    etp = experts_tp(reader_of(root).args)
    for case in cases:
        degrees = [int(n) for n in case.split("x")]
        tp, pp, ep, dp = degrees + [0, 1][len(degrees) - 2:]
        ranks = pp * max(tp * dp, ep * etp)
        with tempfile.TemporaryDirectory() as directory:
            arguments = (ranks, os.path.join(directory, "store"), root, hf_directory, tp, pp, ep)
            mp.start_processes(rank_main, arguments, nprocs=ranks, start_method="fork")


def main():
    import megatron.core.models.gpt.gpt_layer_specs  # eight seconds, once, before the ranks are made
    for line in sys.stdin:
        root, hf_directory, *cases = json.loads(line)
        faulthandler.dump_traceback_later(600, exit=True)
        try:
            check(pathlib.Path(root), pathlib.Path(hf_directory), cases)
            error = ""
        except Exception:
            error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        print("answer: " + json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
