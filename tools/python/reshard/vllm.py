# SPDX-License-Identifier: Apache-2.0
"""A vLLM load format that reads any checkpoint, without converting it first.

    vllm serve MODEL --load-format reshard --model-loader-extra-config '{"source": "step-1000"}'

MODEL is a directory with the config and the tokenizer. vLLM finds this module by the entry point `vllm.general_plugins`.
The extra config may also have `chunk_bytes` and the options of reshard.load(). Each tensor-parallel rank reads all
tensors and keeps its own part, as vLLM's default loader does.
"""

import os


def register():
    """Registers the load format "reshard". vLLM calls it in each of its processes."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class ReshardModelLoader(BaseModelLoader):
        """Streams the tensors of a checkpoint under Hugging Face names into the model."""

        def __init__(self, load_config):
            super().__init__(load_config)
            self._options = dict(load_config.model_loader_extra_config or {})
            if "source" not in self._options:
                raise ValueError("load format reshard: --model-loader-extra-config needs a 'source', a checkpoint")
            self._source = self._options.pop("source")

        def download_model(self, model_config):
            """Does nothing: tensors are read when they are loaded."""

        def load_weights(self, model, model_config):
            from . import stream

            config = os.path.join(model_config.model, "config.json")
            if "config" not in self._options and os.path.exists(config):
                self._options["config"] = config
            loaded = model.load_weights(stream(self._source, framework="torch", **self._options))
            expected = {name for name, _ in model.named_parameters()}
            if loaded is not None and (missing := sorted(expected - loaded)):
                raise ValueError(f"{self._source}: has no values for {len(missing)} parameters: {', '.join(missing[:8])}")

    register_model_loader("reshard")(ReshardModelLoader)
