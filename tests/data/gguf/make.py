#!/usr/bin/env python3
"""Makes the inputs of tests/formats/gguf: tiny models as transformers saves them, and as GGUF.

  tests/data/gguf/make.py DIRECTORY       with torch, transformers and gguf (PyPI)

Files are written by gguf.GGUFWriter, names are those of gguf.get_tensor_name_map(). What llama.cpp's convert_hf_to_gguf.py
does to the tensors is done here after its source (conversion/llama.py, LlamaModel.permute: rows of q and k), because that
program is not in the package.
"""

import pathlib
import sys

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}
Q8_0, BF16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16


def permute(weights, heads):
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write(model, path, arch, quantize=None, endian=gguf.GGUFEndian.LITTLE):
    c = model.config
    writer = gguf.GGUFWriter(path, arch, endianess=endian)
    writer.add_name("tiny")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    writer.add_token_list([f"t{i}" for i in range(c.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = permute(tensor, c.num_attention_heads if "q_proj" in name else c.num_key_value_heads)
        name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.ndim < 2 or endian is gguf.GGUFEndian.BIG:
            writer.add_tensor(name, tensor.float().numpy())
        elif quantize and "ffn_down" in name:
            writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), quantize), raw_dtype=quantize)
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    out = pathlib.Path(sys.argv[1])
    torch.manual_seed(0)
    for arch, (config, kind, more) in MODELS.items():
        model = kind(config(**SIZES, **more)).to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.normal_()
        model.save_pretrained(out / arch)
        for file in (out / arch).iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                file.unlink()
        write(model, out / f"{arch}.gguf", arch)
        if arch == "llama":
            write(model, out / "llama-q8.gguf", arch, Q8_0)
            write(model, out / "llama-big.gguf", arch, endian=gguf.GGUFEndian.BIG)


if __name__ == "__main__":
    main()
