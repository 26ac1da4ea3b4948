"""Checkpoints that the real libraries save, of any size, for the benches: run by the Python of the interop tests' venv.

    trainers_files.py verl HF_MODEL DIRECTORY RANKS       FSDP2's DTensors, torch.save'd by each rank as verl does
    trainers_files.py zero3 CONFIG_JSON DIRECTORY RANKS   DeepSpeed ZeRO 3 with AdamW's state, after one step on the CPU
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", DS_IGNORE_CUDA_DETECTION="1",
                  MASTER_ADDR="127.0.0.1", TOKENIZERS_PARALLELISM="false")
import torch


def verl(model, directory, ranks):
    from safetensors import safe_open
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    directory.mkdir(parents=True)
    (directory / "huggingface").mkdir()
    shutil.copy(model / "config.json", directory / "huggingface")
    files = [safe_open(file, "pt") for file in sorted(model.glob("*.safetensors"))]
    for rank in range(ranks):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {}
        for file in files:
            for name in file.keys():
                whole = file.get_tensor(name)
                each = -(-whole.shape[0] // ranks)
                local = whole[rank * each:(rank + 1) * each].clone()
                state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape,
                                                 stride=whole.stride())
        torch.save(state, directory / f"model_world_size_{ranks}_rank_{rank}.pt")
        torch.distributed.destroy_process_group()


def zero3_rank(rank, ranks, store, config_json, directory):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, ranks), rank=rank,
                                         world_size=ranks)
    import deepspeed
    import transformers
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = transformers.AutoConfig.from_pretrained(config_json)
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
                "zero_allow_untested_optimizer": True, "steps_per_print": 1_000_000_000,
                "communication_data_type": "fp32",
                "zero_optimization": {"stage": 3, "contiguous_gradients": False, "overlap_comm": False,
                                      "reduce_scatter": False}}
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    words = torch.arange(8).reshape(1, 8)
    engine.backward(engine(input_ids=words, labels=words).loss)
    engine.step()
    engine.save_checkpoint(str(directory))
    torch.distributed.destroy_process_group()


def zero3(config_json, directory, ranks):
    import deepspeed, transformers  # once, before the ranks are made
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.start_processes(zero3_rank, (ranks, os.path.join(store, "store"), config_json, directory),
                                              nprocs=ranks, start_method="fork")
    shutil.copy(config_json, directory / "config.json")


if __name__ == "__main__":
    what, source, directory, count = sys.argv[1:]
    {"verl": verl, "zero3": zero3}[what](pathlib.Path(source), pathlib.Path(directory), int(count))
