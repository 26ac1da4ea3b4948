#!/bin/bash
# A vocabulary that was padded for tensor parallelism and not cut back: 128,512 rows in the embedding, 128,256 in the
# head. Loaders that follow the config refuse it; nothing is lost.
. "$(dirname "$0")/lib.sh"
make_temporary

show 0 "723 tensors" synth "$temporary/model" --model llama3-70b --to hf --headers-only \
  --shape model.embed_tokens.weight=128512x8192
show 1 "so the two differ" verify "$temporary/model" --config "$temporary/model/config.json"
