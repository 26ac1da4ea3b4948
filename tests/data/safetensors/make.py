"""Makes variants/ with transformers 5.24.0: a model in float32 and its variant in float16, each in several files.

    python make.py            in tests/data/safetensors
"""
import glob
import shutil
import tempfile

import torch
import transformers

torch.manual_seed(0)
config = transformers.GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=8, n_positions=64)
model = transformers.GPT2LMHeadModel(config)
model.save_pretrained("variants", max_shard_size="2KB")
with tempfile.TemporaryDirectory() as other:  # save_pretrained removes the shards of another save
    model.half().save_pretrained(other, max_shard_size="1KB", variant="fp16")
    for name in glob.glob(other + "/*fp16*"):
        shutil.copy(name, "variants")
