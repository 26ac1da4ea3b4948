#!/bin/bash
# A Llama 3.1 70B reward model as ColossalAI 0.3.7 to 0.4.7 saved it on 8 tensor-parallel ranks: embed_tokens.weight has
# 16,064 rows where the model has 128,256, and the save exited with 0 (hpcaitech/ColossalAI#6108). The files made here
# have their full length and no data: 141 GB that take no room.
. "$(dirname "$0")/lib.sh"
make_temporary

show 0 "722 tensors" synth "$temporary/model" --model llama3-70b --to hf --headers-only \
  --shape model.embed_tokens.weight=16064x8192 --without 'lm_head*'
show 1 "128,512 = 64 x 8 x 251" verify "$temporary/model" --config "$temporary/model/config.json"
