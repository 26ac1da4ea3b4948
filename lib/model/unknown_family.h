// A model of no known family: what its config.json and its names tell all the same, by what all of transformers' models
// have in common.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lib/checkpoint/catalog.h"
#include "lib/model/config.h"

namespace reshard {

struct CommonFacts {
  // Tensors named as vocabularies are in some family ("wte.weight"), as wide as the model: their rows should be words.
  std::vector<const Tensor*> vocabulary;  // the catalog's
  std::vector<std::string> confirmed;     // "wte.weight [50257, 768]: vocab_size x n_embd", "h.{}: n_layer 12"
  // What the config says and the tensors do not have: fewer rows than words, another number of layers.
  struct Contradiction {
    const Tensor* tensor = nullptr;  // the catalog's; null: of the model as a whole
    std::string what;                // "has 30,522 rows where config.json says vocab_size 30,600"
  };
  std::vector<Contradiction> contradictions;
  // Whether the config's numbers of words, of its width and of layers are the tensors' (of a model without words those
  // of queries, or of what an image's patches are made of), and names are like those that a model has in transformers:
  // a module of numbered layers, in another one but where the config's class has no head, and something beside it.
  // Where only configs of its parts say them ("encoder", "text_config"): one part's, and every part has its number of
  // layers.
  bool is_its_model = false;
};
// Whether a parameter is named as the embedding of words is in some family: "shared.embed_tokens.weight".
bool is_embedding(std::string_view parameter, Families families);

CommonFacts common_facts(const Catalog& catalog, const ModelConfig& config);

}  // namespace reshard
