from transformers import PreTrainedConfig


class TinyNetConfig(PreTrainedConfig):
    model_type = "tinynet"

    def __init__(self, vocab_size=1000, width=64, depth=4, heads=8, ratio=3, first_dense=1, has_bias=False, tie_word_embeddings=True, **more):
        self.vocab_size, self.width, self.depth, self.heads, self.ratio = vocab_size, width, depth, heads, ratio
        self.first_dense, self.has_bias = first_dense, has_bias
        super().__init__(tie_word_embeddings=tie_word_embeddings, **more)
