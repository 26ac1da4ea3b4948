# SPDX-License-Identifier: Apache-2.0
"""Makes transformers' models from training checkpoints.

    model = reshard.transformers.load("step-1000", config="config.json", dtype="bfloat16")
"""


def load(source, *, config, model_class=None, **options):
    """Returns the transformers model of a checkpoint of any format. Nothing is written, and no second copy is made.

    config: the model's config.json, its directory, or a PretrainedConfig. model_class: default the class that the config
    names. options: those of reshard.load(), such as dtype, memory, strip_prefix. Fails (CorruptError) if the checkpoint lacks
    parameters of the model.
    """
    import os
    import tempfile

    import transformers

    from ._errors import CorruptError
    from ._load import load as load_tensors

    if not isinstance(config, transformers.PretrainedConfig):
        config = transformers.AutoConfig.from_pretrained(config)
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)  # so that shapes are checked against the config that makes the model
        tensors = load_tensors(source, names="hf", part="model", framework="torch",
                               config=os.path.join(directory, "config.json"), **options)  # fmt: skip
    if model_class is None:
        named = getattr(transformers, (config.architectures or [""])[0], None)
        model_class = named or transformers.AutoModelForCausalLM._model_mapping[type(config)]
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
    model, report = model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype,
                                                output_loading_info=True)  # fmt: skip
    if missing := sorted(report["missing_keys"]):
        raise CorruptError(f"{source}: has no values for {len(missing)} parameters of the model: {', '.join(missing[:8])}", source)
    return model.eval()
