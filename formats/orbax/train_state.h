// SPDX-License-Identifier: Apache-2.0
// The plain keys of a JAX training state: flax.training.train_state.TrainState with optax's Adam, and what MaxText
// 0.2.5 (checkpoint_conversion/utils, trainers/pre_train) writes and reads.
//
//   params.params.decoder.norm.scale            the model
//   opt_state.0.mu.params.decoder.norm.scale    its first moment: optimizer.state.params.decoder.norm.scale.exp_avg
//   opt_state.0.nu.params.decoder.norm.scale    its second moment
//   opt_state.0.count                           Adam's step: optimizer.param_groups.0.step
//   step, opt_state.2.count, nnx_aux....        other state
//
// Levanter (trainer_state.py, tensorstore_serialization.py) has a tree of its own:
//
//   model.transformer.norm.weight                           the model
//   opt_state.inner_state.1.mu.transformer.norm.weight      its first moment
//   opt_state.inner_state.1.count                           Adam's step
//   training_key, opt_state.hyperparams.learning_rate       other state
//
// So does EasyDeL (infra/base_state.py: save_state; eformer/optimizers/_factory.py: the chain):
//
//   model.model.norm.kernel               the model
//   tx.1.0.mu.model.norm.kernel.value     its first moment
//   tx.1.0.count                          Adam's step
//   tx.2.count                            other state
//
// Published checkpoints of Google's gemma library (gm/ckpts/_compat.py) have a flat tree, whose keys are paths:
//
//   transformer/layer_0/attn/q_einsum.w   transformer.layer_0.attn.q_einsum.w
#pragma once

#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// Sets the plain keys of a checkpoint of MaxText or Levanter, which is recognised by the name of its embedding, of
// EasyDeL or of Gemma: of the optimizer, of other state, and of parameters that are spelled as MaxText also reads them
// (layers.0 for layers_0, a last component "value"). The router biases under nnx_aux become the model's. Leaves other
// checkpoints alone.
void set_state_keys(Catalog& catalog);

// Warns of low-rank adapters: MaxText saves them alone, or under names next to the weights that they change.
void warn_of_adapters(Catalog& catalog);

// Names the tensors and objects of a MaxText run as MaxText's trainer does, which restores its state from them. Sets
// the tensors' plain keys to the names that they had, and adds the empty states of optax's chain. Leaves other
// checkpoints alone.
void set_tree_names(LayoutRequest& request);

}  // namespace reshard
