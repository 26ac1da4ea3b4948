// SPDX-License-Identifier: Apache-2.0
// Facts that a checkpoint's writer knows and the files of a copy cannot express: which rows pad the vocabulary, which
// tensors are buffers, what the layers of a pipeline are called in the model. reshard_manifest.json records them, so
// that a copy of a copy is read like the original:
//
//   "provenance": {"written_by": "DeepSpeed 0.19.8", "vocabulary": 149, "buffers": ["model.position_scale"],
//                  "keys": {"0.word_embeddings.weight": "model.embed_tokens.weight"}, "model_names": true,
//                  "models": [{"prefix": "model_1.", "name": "model_1"}, ...], "lacks_optimizer": true,
//                  "delta_of": "step-100"}
//
// Empty members are left out. Names are those of the checkpoint next to the manifest.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"

namespace reshard {

inline constexpr std::string_view kProvenance = "provenance";  // the member of the manifest
inline constexpr std::string_view kMadeFrom = "made from";     // the catalog attribute made from it

// The name of an output tensor, and the source tensor that it comes from, whole or in part.
using NamedOrigin = std::pair<std::string, const Tensor*>;

struct ProvenanceOptions {
  std::string delta_of = {};    // of the output, as Catalog::delta_of
  Index vocabulary = 0;         // of the output, as Catalog::vocabulary
  bool keeps_names = true;      // the output has the source's names of tensors and objects
  bool model_names = true;      // if not, they are still the names that the model's loaders expect
  bool holds_optimizer = true;  // the output's format can hold optimizer state
};

// Returns the `provenance` object for the manifest of a copy of `source`.
Json provenance_of(const Catalog& source, const std::vector<NamedOrigin>& tensors, const ProvenanceOptions& options);

// Adds what the manifest records of its source to the catalog of an open checkpoint, before its parts are found. Does
// nothing without a manifest. A manifest that cannot be parsed, or that belongs to files of other names or sizes, only
// adds a warning or a note. Fails if the file cannot be opened or read.
Status adopt_provenance(Reader& reader);

}  // namespace reshard
