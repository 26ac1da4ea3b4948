// SPDX-License-Identifier: Apache-2.0
// The names that the configs of different models give to the same number, from PretrainedConfig.attribute_map of
// transformers and from other trainers. For models that no table describes.
#pragma once

#include <string_view>

namespace reshard {

inline constexpr std::string_view kWidthNames[] = {
    "hidden_size", "d_model", "n_embd", "dim",           "embed_dim",           "embedding_size",      "emb_dim",
    "model_dim",   "n_embed", "n_dim",  "embedding_dim", "word_embed_proj_dim", "input_embedding_size"};
inline constexpr std::string_view kDepthNames[] = {"num_hidden_layers",
                                                   "num_layers",
                                                   "n_layer",
                                                   "n_layers",
                                                   "encoder_layers",
                                                   "decoder_layers",
                                                   "num_blocks",
                                                   "num_encoder_layers",
                                                   "num_decoder_layers",
                                                   "num_layers_per_stack",
                                                   "num_hidden_groups",
                                                   "layers",
                                                   "depth"};
inline constexpr std::string_view kVocabularyNames[] = {"vocab_size",       "decoder_vocab_size", "tgt_vocab_size",
                                                        "src_vocab_size",   "text_vocab_size",    "n_words",
                                                        "padded_vocab_size"};

}  // namespace reshard
