"""LoRA on fused experts, as PEFT's target_parameters trains it (peft 0.21.2, transformers 5.24): base/, adapter/, state/ (the whole
training state as a DCP) and merged.json (digests of PEFT's merge_and_unload). gpt-oss has square matrices with the inputs first.

    python make.py    in this directory
"""
import copy, json, pathlib, shutil, sys, torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.append("..")
from file_digests import digests

small = dict(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts_per_tok=1)
qwen = Qwen3MoeConfig(**small, intermediate_size=24, moe_intermediate_size=8, num_experts=2, tie_word_embeddings=False)
oss = GptOssConfig(**small, intermediate_size=16, num_local_experts=2)
both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


for name, cls, config, parameters, modules in (("qwen", Qwen3MoeForCausalLM, qwen, both, ["q_proj"]), ("oss", GptOssForCausalLM, oss, both[1:], [])):
    shutil.rmtree(name, ignore_errors=True)
    torch.manual_seed(0)
    base = cls(config).to(torch.bfloat16)
    with torch.no_grad():
        for p in base.parameters():
            p.copy_(torch.randn(p.shape) * .1)
    base.save_pretrained(f"{name}/base")
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=modules, target_parameters=parameters, rank_pattern={both[1]: 3} if modules else {}))
    for n, p in model.named_parameters():
        if "lora_" in n:
            p.data = torch.randn_like(p) * .1
    model.save_pretrained(f"{name}/adapter")
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{name}/state", no_dist=True)
    config.save_pretrained(f"{name}/state")
    copy.deepcopy(model).merge_and_unload().save_pretrained(f"{name}/merged")
    with open(f"{name}/merged.json", "w") as f:
        json.dump(digests(f"{name}/merged/model.safetensors"), f, indent=0)
    shutil.rmtree(f"{name}/merged")
    for junk in ("base/generation_config.json", "adapter/README.md", "state/generation_config.json"):
        pathlib.Path(name, junk).unlink(missing_ok=True)
