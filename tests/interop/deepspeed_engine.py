"""Loads a universal checkpoint with DeepSpeed's own engine, on the CPU, and compares every parameter's master and moments.

    python deepspeed_engine.py DIRECTORY HF_DIRECTORY STAGExRANKS ...

DIRECTORY has latest_universal; HF_DIRECTORY has config.json, optimizer.safetensors (fp32.NAME, exp_avg.NAME,
exp_avg_sq.NAME) and groups.json ({"step": ..., "lr": ..., "betas": ..., "weight_decay": ...}).
"""
import json
import os
import pathlib
import sys
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", DS_IGNORE_CUDA_DETECTION="1",
                  MASTER_ADDR="127.0.0.1", TOKENIZERS_PARALLELISM="false")
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file


def rank_main(rank, ranks, store, root, hf_directory, stage):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks)
    import deepspeed
    import transformers
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = transformers.AutoConfig.from_pretrained(hf_directory)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.5), weight_decay=0.5)
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
                "zero_allow_untested_optimizer": True, "steps_per_print": 1_000_000_000,
                "communication_data_type": "fp32", "checkpoint": {"load_universal": True},
                "zero_optimization": {"stage": stage, "contiguous_gradients": False, "overlap_comm": False,
                                      "reduce_scatter": False}}
    names = [name for name, _ in model.named_parameters()]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    words = torch.arange(8).reshape(1, 8) % config.vocab_size
    engine.backward(engine(input_ids=words, labels=words).loss)
    engine.step()
    engine.load_checkpoint(str(root), load_lr_scheduler_states=False)
    truth = load_file(hf_directory / "optimizer.safetensors")
    groups = json.loads((hf_directory / "groups.json").read_text())
    for name, parameter in zip(names, engine.module.parameters()):
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            wanted = truth[f"{kind}.{name}"]
            got = (safe_get_full_fp32_param(parameter) if kind == "fp32"
                   else safe_get_full_optimizer_state(parameter, kind))
            assert torch.equal(got.reshape(wanted.shape), wanted), f"{kind} of {name} differs"
    for group in engine.optimizer.optimizer.param_groups:
        assert group["lr"] == groups["lr"] and list(group["betas"]) == groups["betas"], group
        assert group["weight_decay"] == groups["weight_decay"], group
    steps = [float(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state]
    assert steps and all(step == groups["step"] for step in steps), steps
    assert engine.global_steps == groups["step"], engine.global_steps
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    root, hf_directory = map(pathlib.Path, sys.argv[1:3])
    import deepspeed, transformers  # once, before the ranks are made
    for case in sys.argv[3:]:
        stage, ranks = map(int, case.split("x"))
        with tempfile.TemporaryDirectory() as directory:
            arguments = (ranks, os.path.join(directory, "store"), root, hf_directory, stage)
            mp.start_processes(rank_main, arguments, nprocs=ranks, start_method="fork")
        print(f"ZeRO {stage} on {ranks} ranks: loaded", flush=True)


if __name__ == "__main__":
    main()
