// Gemma 2 and 3: four norms a layer, and a head that is the embedding. Gemma 3 with an image encoder keeps its language
// model under a prefix. transformers/models/{gemma2,gemma3}.
#include "lib/model/rules.h"

namespace reshard {
namespace {

constexpr auto kFeedForwardNorms = std::to_array<NameRule>({
    {.hf = "model.layers.{}.pre_feedforward_layernorm.weight", .shape = "hidden_size"},
    {.hf = "model.layers.{}.post_feedforward_layernorm.weight", .shape = "hidden_size"},
});
constexpr auto kGemma2Rules = rules::join(rules::kEnds, rules::kNorms, kFeedForwardNorms, rules::kAttention,
                                          rules::kAttentionBiases, rules::kMlp);
constexpr auto kGemma3Rules = rules::join(kGemma2Rules, rules::kQueryKeyNorms);

constexpr std::string_view kGemma2Types[] = {"gemma2"};
constexpr std::string_view kGemma3Types[] = {"gemma3", "gemma3_text"};

constexpr ConfigDefault kGemma2Defaults[] = {
    {"num_key_value_heads", "4"}, {"head_dim", "256"}, {"tie_word_embeddings", "1"}};
// A text_config holds no more than what differs from these.
constexpr ConfigDefault kGemma3Defaults[] = {
    {"vocab_size", "262208"},    {"hidden_size", "2304"},      {"intermediate_size", "9216"},
    {"num_hidden_layers", "26"}, {"num_attention_heads", "8"}, {"num_key_value_heads", "4"},
    {"head_dim", "256"},         {"tie_word_embeddings", "1"},
};

}  // namespace

const Family kGemma2Family = {"gemma2", "Gemma 2", kGemma2Types, kGemma2Defaults, kGemma2Rules};
const Family kGemma3Family = {"gemma3", "Gemma 3", kGemma3Types, kGemma3Defaults, kGemma3Rules, "language_model."};

}  // namespace reshard
