# SPDX-License-Identifier: Apache-2.0
"""Makes transformers' models from training checkpoints.

    model = reshard.transformers.load("step-1000", config="config.json", dtype="bfloat16")
"""


def load(source, *, config, model_class=None, **options):
    """Returns the transformers model of a checkpoint of any format. Nothing is written, and no second copy is made.

    config: the model's config.json, its directory, or a PretrainedConfig. model_class: default the class that the config
    names. options: those of reshard.load(), such as dtype, memory, strip_prefix. Of a model type that reshard.families() does
    not list, the checkpoint must have the names of transformers, below any prefix. Fails (CorruptError) if the checkpoint
    lacks parameters of the model.
    """
    import os
    import tempfile

    import transformers

    from ._errors import CorruptError
    from ._load import load as load_tensors
    from ._more import families

    if not isinstance(config, transformers.PretrainedConfig):
        config = transformers.AutoConfig.from_pretrained(config)
    if model_class is None:
        named = getattr(transformers, (config.architectures or [""])[0], None)
        model_class = named or transformers.AutoModelForCausalLM._model_mapping[type(config)]
    is_known = "family_file" in options or any(config.model_type in family.model_types for family in families())
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)  # so that shapes are checked against the config that makes the model
        translated = {"names": "hf"} if is_known else {"family": "none"}
        options = {"part": "model", **translated, "config": os.path.join(directory, "config.json"), **options}
        tensors = load_tensors(source, framework="torch", **options)
    if not is_known:
        tensors = _without_prefix(tensors, model_class, config)
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
    model, report = model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype,
                                                output_loading_info=True)  # fmt: skip
    if missing := sorted(report["missing_keys"]):
        raise CorruptError(f"{source}: has no values for {len(missing)} parameters of the model: {', '.join(missing[:8])}", source)
    return model.eval()


def _without_prefix(tensors, model_class, config):
    """Returns tensors under the names that the model has, if they are stored below a prefix: of a wrapper or a training state."""
    import collections

    import torch

    with torch.device("meta"):
        expected = set(model_class(config).state_dict())
    prefixes = collections.Counter()
    for name in tensors:
        starts = [0, *(i + 1 for i, c in enumerate(name) if c == ".")]
        prefixes.update(name[:start] for start in starts if name[start:] in expected)
    prefix = max(prefixes, key=lambda p: (prefixes[p], -len(p)), default="")
    return {name[len(prefix):]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
