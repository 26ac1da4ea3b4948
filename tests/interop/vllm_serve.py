"""Generates with vLLM from training checkpoints by reshard's load format and its weight transfer engine, and from the
converted model by vLLM's own loader, and checks that the tokens are the same, and that each of two ranks reads its part.

usage: vllm_serve.py RESHARD                  (in an environment with vLLM for CPUs and the reshard package: vllm_venv.sh)
       vllm_serve.py RESHARD --time ROUNDS    also prints the time to the first token of a model of 1.1 GB in bfloat16
"""
import glob
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 704,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
          "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32"}
LARGE = {**CONFIG, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16"}
MADE = "made: "
PROMPTS = [[1, 2, 3, 4, 5], [700, 20, 11]]
MESH = ["--mesh", "tp=2,dp_shard=2"]
SAVED = {"dcp": ["--to", "dcp", "--names", "torchtitan", *MESH], "megatron": ["--to", "megatron"], "hf": ["--to", "hf"],
         "megatron-legacy": ["--to", "megatron-legacy", "--mesh", "tp=2"]}


def generate(model, update=(), tokens=8, dtype="float32", **how):
    """Returns the tokens of each prompt, after each source of `update` too, and the seconds to the first token."""
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    if update:
        how["weight_transfer_config"] = WeightTransferConfig(backend="reshard")
    start = time.monotonic()
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype=dtype,
              enable_prefix_caching=False, **how)  # fmt: skip

    def outputs(count):
        sampling = SamplingParams(max_tokens=count, temperature=0, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling)]

    outputs(1)
    seconds = time.monotonic() - start
    made = [outputs(tokens)]
    for source in update:
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"source": source}})
        llm.finish_weight_update()
        made.append(outputs(tokens))
    return made, seconds


def write_zero3(directory, model, ranks=2):
    """Writes the weights of a converted model as ZeRO 3 does: each rank has a part of each parameter, in float32.

    Written after deepspeed/runtime/zero/stage3.py and deepspeed/runtime/engine.py.
    """
    import torch
    from safetensors.torch import load_file

    step = os.path.join(directory, "zero3", "global_step1")
    os.makedirs(step)
    state = {}
    for file in glob.glob(os.path.join(directory, model, "*.safetensors")):
        state.update(load_file(file))
    for rank in range(ranks):
        parts = []
        for tensor in state.values():
            length = -(-tensor.numel() // ranks)
            padded = torch.zeros(length * ranks)
            padded[:tensor.numel()] = tensor.flatten()
            parts.append(padded[rank * length:(rank + 1) * length])
        flat = torch.cat(parts)
        moments = {0: {"step": 1, "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}}
        torch.save({"module": {name: torch.empty(0) for name in state}, "buffer_names": [], "optimizer": None, "shared_params": {},
                    "param_shapes": [{name: tensor.shape for name, tensor in state.items()}], "frozen_param_shapes": {},
                    "frozen_param_fragments": {}, "dp_world_size": ranks, "mp_world_size": 1, "global_steps": 1, "ds_config": {},
                    "ds_version": "0.19.8"}, os.path.join(step, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))  # fmt: skip
        optimizer = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": [flat],
                     "optimizer_state_dict": {"state": moments, "param_groups": [{"params": [0]}]}}  # fmt: skip
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"},
                   os.path.join(step, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))  # fmt: skip
    with open(os.path.join(directory, "zero3", "latest"), "w") as f:
        f.write("global_step1")
    shutil.copy(os.path.join(directory, model, "config.json"), os.path.join(directory, "zero3"))


def generated(directory, model, **how):
    """The same in a process of its own, whose times do not depend on what came before, and the GB that each rank has read."""
    environment = dict(os.environ, VLLM_CPU_KVCACHE_SPACE="1", VLLM_PLUGINS="reshard",
                       VLLM_ENABLE_V1_MULTIPROCESSING="0")  # fmt: skip
    if how.get("tensor_parallel_size") == 2:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # otherwise each rank wants a NUMA node of its own
    command = [sys.executable, os.path.abspath(__file__), "--generate", json.dumps({"model": model, **how})]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"vllm: {how} failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    made, seconds = json.loads(done.stdout.rsplit(MADE, 1)[1].splitlines()[0])  # vLLM prints more when it ends
    return made, seconds, [float(gb) for gb in re.findall(r"reshard read ([0-9.]+) GB", done.stdout + done.stderr)]


def gb_of_ranks(directory, ranks):
    """What each of the ranks holds of the model: of all but the norms its part."""
    total = 0
    for file in glob.glob(os.path.join(directory, "model", "*.safetensors")):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                total += (end - begin) / (1 if "norm" in name else ranks)
    return [round(total / 1e9, 6)] * ranks


def streamed(source, **how):
    return {"load_format": "reshard", "model_loader_extra_config": {"source": source}, **how}


def main(reshard, rounds):
    def run(*words):
        subprocess.run([reshard, *words, "-q"], check=True, cwd=directory)

    with tempfile.TemporaryDirectory() as directory:
        for name, config in (("config", CONFIG), ("large", LARGE)):
            os.mkdir(os.path.join(directory, name))
            with open(os.path.join(directory, name, "config.json"), "w") as f:
                json.dump(config, f)
        for name, words in SAVED.items():  # the same values
            run("synth", name, "--config", "config/config.json", *words)
        run("convert", "dcp", "model", "--to", "hf", "--config", "config/config.json")
        write_other(directory)
        write_zero3(directory, "model")

        expected, _, _ = generated(directory, "model")
        sources = [*SAVED, "zero3"]
        cases = {name: ("config", streamed(name)) for name in sources}
        cases |= {f"{name}, tp=2": ("config", streamed(name, tensor_parallel_size=2)) for name in sources}
        wrong = []
        for name, (model, how) in cases.items():
            made, _, read = generated(directory, model, **how)
            ranks = how.get("tensor_parallel_size", 1)
            print(f"vllm, {name}: {'same tokens' if made == expected else made}, GB read: {read}", flush=True)
            wrong += [name] if made != expected or read != gb_of_ranks(directory, ranks) else []

        before, _, _ = generated(directory, "other")
        made, _, _ = generated(directory, "other", update=["dcp", "other", "megatron"])
        same = made == [before[0], expected[0], before[0], expected[0]]
        print(f"vllm, other weights while it runs: {'same tokens' if same else made}", flush=True)
        if wrong or not same or before == expected:
            sys.exit(f"vllm: differs: {wrong}; expected {expected}, of the other model {before}; each of two ranks reads "
                     f"{gb_of_ranks(directory, 2)} GB")  # fmt: skip
        if rounds:
            time_first_token(directory, run, rounds)


def write_other(directory):
    """Writes another model of the same shapes: all values in reverse order."""
    shutil.copytree(os.path.join(directory, "model"), os.path.join(directory, "other"))
    for file in glob.glob(os.path.join(directory, "other", "*.safetensors")):
        data = numpy.fromfile(file, "u1")
        begin = 8 + int(data[:8].view("<u8")[0])
        data[begin:] = data[begin:].view("<f4")[::-1].copy().view("u1")
        data.tofile(file)


def time_first_token(directory, run, rounds):
    run("synth", "saved", "--config", "large/config.json", "--dtype", "bfloat16", *SAVED["dcp"])
    run("convert", "saved", "converted", "--to", "hf", "--config", "large/config.json")
    sides = {"reshard": ("large", streamed("saved")), "converted": ("converted", {})}
    times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (model, how) in sides.items():
            times[name].append(generated(directory, model, dtype="bfloat16", tokens=1, **how)[1])
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"first token: reshard {medians['reshard']:.1f} s, converted {medians['converted']:.1f} s, "
          f"{medians['reshard'] / medians['converted']:.2f} x")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--generate":
        print("\n" + MADE + json.dumps(generate(**json.loads(sys.argv[2]))), flush=True)
    else:
        main(os.path.abspath(sys.argv[1]), int(sys.argv[3]) if sys.argv[2:3] == ["--time"] else 0)
