"""LoRA on a model whose head is tied to the embedding (peft 0.21.2, transformers 5.24). PEFT saves both under their own
names: alike/ has them equal (ensure_weight_tying), and merged.json the digests of its merge_and_unload; in apart/ each
was trained by itself.

    python make.py    in this directory
"""
import json, pathlib, shutil, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append("..")
from file_digests import digests

config = LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True)

torch.manual_seed(0)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("base")
for name, more in (("alike", dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)), ("apart", dict(modules_to_save=["embed_tokens", "lm_head"]))):
    torch.manual_seed(1)
    model = get_peft_model(LlamaForCausalLM.from_pretrained("base", dtype=torch.bfloat16), LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], **more))
    for n, p in model.named_parameters():
        if p.requires_grad and "lora_A" not in n:
            p.data = p.data + torch.randn_like(p) * .1
    model.save_pretrained(name)
    if name == "alike":
        model.merge_and_unload().save_pretrained("merged")
        with open("merged.json", "w") as f:
            json.dump(digests("merged/model.safetensors"), f, indent=0)
shutil.rmtree("merged")
for junk in ("base/generation_config.json", "alike/README.md", "apart/README.md"):
    pathlib.Path(junk).unlink(missing_ok=True)
