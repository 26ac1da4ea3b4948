"""Generates with vLLM from a training checkpoint by reshard's load format, and from the converted model by vLLM's own
loader, and checks that the tokens are the same. Prints the seconds that each took to load.

usage: vllm_serve.py RESHARD      (in an environment with vLLM for CPUs and the reshard package: vllm_venv.sh)
"""
import json
import os
import subprocess
import sys
import tempfile
import time

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_PLUGINS="reshard", VLLM_ENABLE_V1_MULTIPROCESSING="0")
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 704,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
          "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32"}
PROMPTS = [[1, 2, 3, 4, 5], [700, 20, 11]]


def generate(model, **how):
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    llm = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="float32", **how)
    seconds = time.monotonic() - start
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling)
    return [list(o.outputs[0].token_ids) for o in outputs], seconds


def main():
    reshard = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        os.mkdir("config")
        with open("config/config.json", "w") as f:
            json.dump(CONFIG, f)
        subprocess.run([reshard, "synth", "saved", "--config", "config/config.json", "--to", "dcp", "--names", "torchtitan",
                        "--mesh", "tp=2,dp_shard=2", "-q"], check=True)  # fmt: skip
        subprocess.run([reshard, "convert", "saved", "model", "--to", "hf", "--config", "config/config.json", "-q"], check=True)
        streamed, seconds = generate("config", load_format="reshard", model_loader_extra_config={"source": "saved"})
        converted, usual = generate("model")
    print(f"reshard {seconds:.1f} s, converted {usual:.1f} s")
    if streamed != converted:
        sys.exit(f"vllm: tokens differ: {streamed} from the checkpoint, {converted} from the converted model")
    print("vllm: same tokens")


if __name__ == "__main__":
    main()
