#!/usr/bin/env python3
"""What experts and quantized weights cost, as ratios of interleaved runs (A B A B ...), medians.

  tests/bench/experts_bench.py [--rounds 7] [--part experts|quantized] [--work DIRECTORY] [--pause SECONDS]

Makes models of 3.0 GB and times `convert --to hf` of each, CRC check and digests on:
  experts     as FSDP's eight ranks save them (DCP), under the names of transformers' memory
    dense            Llama 3's shapes: nothing is fused
    qwen3_moe        gate_up_proj [E, 2F, D] and down_proj [E, D, F], which become 3,456 matrices
    mixtral          likewise, fewer and larger ones
    gpt_oss          [E, D, 2F] and [E, F, D], in files too
    gpt_oss columns  the same cut along the columns of each matrix by tensor parallelism (tp=8)
  quantized   Hugging Face's files: against the copy of the same model in bfloat16
    deepseek_v3      a copy in bfloat16;  --quantize fp8-block of it;  --dtype bfloat16 of what that makes
    gpt_oss          a copy in bfloat16;  --dtype bfloat16 of MXFP4
Every output is removed before the next run. Figures go to docs/benchmarks.md with this command.
"""
import json

import interleaved

COMMON = {"vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "torch_dtype": "bfloat16",
          "tie_word_embeddings": False}
MODELS = {
    "qwen3_moe": {"hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 384, "num_experts": 64,
                  "num_hidden_layers": 18},
    "mixtral": {"hidden_size": 2048, "intermediate_size": 2816, "num_local_experts": 8, "num_hidden_layers": 10},
    "gpt_oss": {"hidden_size": 1024, "intermediate_size": 768, "num_local_experts": 32, "num_hidden_layers": 18},
    "deepseek_v3": {"num_key_value_heads": 16, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024,
                    "num_hidden_layers": 8, "n_routed_experts": 29, "n_shared_experts": 1, "first_k_dense_replace": 1,
                    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                    "v_head_dim": 128, "num_nextn_predict_layers": 0},
}


def synth(bench, name, kind, *options, **members):
    config = bench.path(name + ".json")
    with open(config, "w") as f:
        json.dump({"model_type": kind, **COMMON, **MODELS[kind], **members}, f)
    return bench.made(name, "synth", None, "--config", config, *options)


def experts(bench):
    """{side: (source, options, base)}"""
    def model(name, kind, mesh):
        return synth(bench, name, kind, "--names", "transformers", "--mesh", mesh)

    sides = {"dense": (bench.model("dense", "--names", "hf", "--mesh", "dp_shard=8"), [], "dense")}
    for kind in ("qwen3_moe", "mixtral", "gpt_oss"):
        sides[kind] = (model(kind, kind, "dp_shard=8"), [], "dense")
    sides["gpt_oss columns"] = (model("columns", "gpt_oss", "tp=8"), [], "dense")
    return sides


def quantized(bench):
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}
    plain = synth(bench, "deepseek", "deepseek_v3", "--to", "hf", "--names", "hf")
    blocks = bench.made("fp8", "convert", plain, None, "--to", "hf", "--quantize", "fp8-block")
    experts = synth(bench, "experts", "gpt_oss", "--to", "hf", "--names", "hf")
    packed = synth(bench, "mxfp4", "gpt_oss", "--to", "hf", "--names", "hf", **mxfp4)
    return {"deepseek_v3": (plain, [], "deepseek_v3"),
            "to fp8 blocks": (plain, ["--quantize", "fp8-block"], "deepseek_v3"),
            "from fp8 blocks": (blocks, ["--dtype", "bfloat16"], "deepseek_v3"),
            "gpt_oss": (experts, [], "gpt_oss"),
            "from mxfp4": (packed, ["--dtype", "bfloat16"], "gpt_oss"),
            "to mxfp4": (experts, ["--quantize", "mxfp4"], "gpt_oss"),
            "to fp8, a scale each": (plain, ["--quantize", "fp8-tensor"], "deepseek_v3")}


PARTS = {"experts": experts, "quantized": quantized}


def main():
    options = {"pause": interleaved.PAUSE, "part": {"default": "experts", "choices": list(PARTS)}}
    with interleaved.bench(__doc__, **options) as bench:
        out = bench.path("out")
        made = PARTS[bench.args.part](bench)
        files = {name: interleaved.files_of(source) for name, (source, _, _) in made.items()}
        sides = {name: [bench.reshard, "convert", source, out, "--to", "hf", "-q", *options]
                 for name, (source, options, _) in made.items()}
        times, memory, _ = bench.rounds(sides, out, files)
        sizes = {name: interleaved.size_of(of) / 1e9 for name, of in files.items()}
        medians, bases = interleaved.medians(times), {name: base for name, (_, _, base) in made.items()}
        print(f"{bench.args.part}, {bench.args.rounds} rounds")
        columns = {"GB read": sizes, "/ base": interleaved.ratios(times, bases)}
        if bench.args.part == "experts":
            columns["a byte"] = {name: m / sizes[name] * sizes[bases[name]] / medians[bases[name]]
                                 for name, m in medians.items()}
        interleaved.print_table(times, {**columns, "peak MiB": interleaved.mebibytes(memory)})


if __name__ == "__main__":
    main()
