# SPDX-License-Identifier: Apache-2.0
"""A vLLM load format and a weight transfer engine that read any checkpoint, without converting it first.

    vllm serve MODEL --load-format reshard --model-loader-extra-config '{"source": "step-1000"}'

MODEL is a directory with the config and the tokenizer. vLLM finds this module by the entry point `vllm.general_plugins`.
The extra config may also have `chunk_bytes`, the options of reshard.load(), and those of vLLM's default loader. Each rank
reads the part of each tensor that vLLM's weight loaders keep. Tensors that must be computed (dequantized, joined, converted by
dtype) and those whose loaders want all elements are read whole, `chunk_bytes` of them at once.

With --weight-transfer-config '{"backend": "reshard"}' a server that runs takes the weights of another step, by vLLM's
calls start_weight_update, update_weights and finish_weight_update:

    {"update_info": {"source": "step-2000"}}          # or with "options": those of the extra config
"""

import copy
import dataclasses
import os

_LOADERS_OWN = ("enable_weights_track", "enable_multithread_load", "num_threads")  # of vLLM's default loader


def register():
    """Registers the load format and the engine "reshard". vLLM calls it in each of its processes, sometimes twice."""
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader("reshard")(_loader())
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
    except ImportError:
        return  # an older vLLM: it has no engines
    if "reshard" not in factory._registry:
        factory.register_engine("reshard", __name__, "WeightTransferEngine")


def __getattr__(name):
    if name == "WeightTransferEngine":
        return _engine()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _stream(source, model_config, options, count=lambda nbytes: None):
    """Yields a checkpoint's tensors under Hugging Face names, checked against the config of vLLM's model.

    `count` is called with the number of bytes of each read.
    """
    from ._stream import lazy_stream

    config = os.path.join(model_config.model, "config.json")
    if os.path.exists(config):
        options = {"config": config, **options}
    return lazy_stream(source, count=count, **options)


def _loader():
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    logger = init_logger("vllm." + __name__)  # vLLM shows the messages of its own loggers

    class ReshardModelLoader(DefaultModelLoader):
        """Is vLLM's default loader, which checks that all parameters are loaded, with another source of tensors."""

        def __init__(self, load_config):
            options = dict(load_config.model_loader_extra_config or {})
            if "source" not in options:
                raise ValueError("load format reshard: --model-loader-extra-config needs a 'source', a checkpoint")
            self._source = options.pop("source")
            usual = copy.copy(load_config)
            usual.model_loader_extra_config = {k: options.pop(k) for k in _LOADERS_OWN if k in options}
            self._options = options
            self._bytes = 0
            super().__init__(usual)

        def download_model(self, model_config):
            """Does nothing: tensors are read when they are loaded."""

        def get_all_weights(self, model_config, model):
            return _stream(self._source, model_config, self._options, self._count)

        def load_weights(self, model, model_config):
            super().load_weights(model, model_config)
            logger.info("reshard read %.6f GB of %s", self._bytes / 1e9, self._source)

        def _count(self, nbytes):
            self._bytes += nbytes

    return ReshardModelLoader


def _engine():
    import torch
    from vllm.distributed.weight_transfer import base
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclasses.dataclass
    class InitInfo(base.WeightTransferInitInfo):
        pass

    @dataclasses.dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):
        source: str
        options: dict = dataclasses.field(default_factory=dict)

    class WeightTransferEngine(base.WeightTransferEngine):
        """Loads another checkpoint of the model into a server that runs."""

        init_info_cls = InitInfo
        update_info_cls = UpdateInfo

        def init_transfer_engine(self, init_info):
            """Does nothing: there is no connection to make."""

        def start_weight_update(self):
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info):
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():  # vLLM's own would fail on a CPU
                torch.accelerator.synchronize()

        def receive_weights(self, update_info):
            self.model.load_weights(_stream(update_info.source, self.model_config, update_info.options))

        def finish_weight_update(self):
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self):
            """Does nothing: there is no connection to close."""

    return WeightTransferEngine
