// Fixtures for tests of single conversion steps: two made-up formats, and the results of the first steps.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "lib/convert/steps.h"
#include "tests/support/must.h"

namespace reshard {

// Returns the error's message, or nothing if there was no error.
template <class T>
std::string error_of(const Result<T>& r) {
  return r ? "" : r.error().message();
}

// The config.json of a one-layer model whose head is tied to the embedding.
inline constexpr const char* kTinyLlama =
    R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": true})";

// A format that stores only models, under loaders' names, and one that stores everything under any names.
inline const Format kModels = {.name = "models",
                               .title = "Models",
                               .recognises = nullptr,
                               .open = nullptr,
                               .lay_out = nullptr,
                               .holds = StateSupport::kModel,
                               .hf_names = true};
inline const Format kAll = {.name = "all", .title = "All", .recognises = nullptr, .open = nullptr, .lay_out = nullptr};

inline Translation translated(const Catalog& catalog, const Format& format, const Naming& naming = {},
                              const std::string& config = kTinyLlama) {
  return must(translate(catalog, {}, {"c.json", config, {}}, naming, format));
}

inline SourceView viewed(const Catalog& catalog, const Format& format, const Translation& names) {
  ConversionNotes notes;
  const Selected selected = must(select(catalog, {}, format, false, true, notes));
  return must(view_source(catalog, selected, names, false, true, notes));
}

inline std::vector<std::string> names_of(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const Tensor& t : catalog.tensors()) out.push_back(t.name);
  return out;
}

}  // namespace reshard
