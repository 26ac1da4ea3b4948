// Checks a model of no known family against its config.json, using what all transformers models have in common.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/model/config.h"

namespace reshard {

struct CommonFacts {
  // Tensors of the catalog named like a vocabulary in some family ("wte.weight") and as wide as the model: their rows
  // should be words.
  std::vector<const Tensor*> vocabulary;  // the catalog's
  std::vector<std::string> confirmed;     // "wte.weight [50257, 768]: vocab_size x n_embd", "h.{}: n_layer 12"
  // Where the tensors contradict the config: fewer rows than words, another number of layers.
  struct Contradiction {
    const Tensor* tensor = nullptr;  // in the catalog; null: the model as a whole
    std::string what;                // "has 30,522 rows where config.json says vocab_size 30,600"
  };
  std::vector<Contradiction> contradictions;
  // Whether the tensors are the config's model. The config's vocabulary, width and number of layers must match the
  // tensors (without a vocabulary, the number of queries or the size of image patches), and the names must look like
  // those of a transformers model: a module of numbered layers, inside another module unless the config's class has no
  // head, and something next to it. If only configs of parts give these numbers ("encoder", "text_config"), one part
  // must match, and every part's number of layers.
  bool is_its_model = false;
};
// Returns whether a parameter is named like a word embedding in some family: "shared.embed_tokens.weight".
bool is_embedding(std::string_view parameter, Families families);

CommonFacts common_facts(const Catalog& catalog, const ModelConfig& config);

}  // namespace reshard
