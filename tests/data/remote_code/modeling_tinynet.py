"""A model class that transformers does not have, as its repository on the Hub would: every second layer has one tensor more,
the first layers have none of another, and the heads' width is rounded down."""
import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_tinynet import TinyNetConfig

print("standard output of a model's code")


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * (config.width // config.heads) * config.heads, bias=config.has_bias)
        self.up = nn.Linear(config.width, config.ratio * config.width, bias=False)
        self.down = nn.Linear(config.ratio * config.width, config.width, bias=False)
        if layer >= config.first_dense:
            self.gate = nn.Linear(config.width, config.heads, bias=False)
        if layer % 2:
            self.slope = nn.Parameter(torch.zeros(config.heads))


class TinyNetPreTrained(PreTrainedModel):
    config_class = TinyNetConfig
    base_model_prefix = "net"


class TinyNetModel(TinyNetPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.post_init()

    def get_input_embeddings(self):
        return self.words


class TinyNetForCausalLM(TinyNetPreTrained):
    _tied_weights_keys = {"head.weight": "net.words.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.net = TinyNetModel(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.net.words

    def get_output_embeddings(self):
        return self.head
