// What a checkpoint's writer knows and a copy's files cannot hold: which rows pad the vocabulary, which tensors are
// buffers, what the layers of a pipeline are called in the model. reshard_manifest.json records it, so that a copy of a
// copy is read as the original would be:
//
//   "provenance": {"written_by": "DeepSpeed 0.19.8", "vocabulary": 149, "buffers": ["model.position_scale"],
//                  "keys": {"0.word_embeddings.weight": "model.embed_tokens.weight"}, "model_names": true,
//                  "models": [{"prefix": "model_1.", "name": "model_1"}, ...], "lacks_optimizer": true}
//
// Members that say nothing are left out. Names are those of the checkpoint that the manifest lies beside.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/checkpoint/format.h"

namespace reshard {

inline constexpr std::string_view kProvenance = "provenance";  // the member of the manifest
inline constexpr std::string_view kMadeFrom = "made from";     // the attribute that it becomes

// A tensor of the output: its name there, and the tensor of the source that it is, wholly or in part.
using NamedOrigin = std::pair<std::string, const Tensor*>;

struct ProvenanceOptions {
  Index vocabulary = 0;         // of the output, as Catalog::vocabulary
  bool keeps_names = true;      // the output has the source's names, those of its objects too
  bool model_names = true;      // and if not, they are still those of the model's loaders
  bool holds_optimizer = true;  // the output could have the optimizer's state
};

// The member of the manifest of a copy of `source`, which is an object.
Json provenance_of(const Catalog& source, const std::vector<NamedOrigin>& tensors, const ProvenanceOptions& options);

// Adds to the catalog of an open checkpoint, before its parts are found, what its manifest records of its source.
// Nothing where there is no manifest. A manifest that cannot be read, or that was written for files of other names or
// sizes, adds a warning or a note and nothing else. Fails where the file cannot be opened or read.
Status adopt_provenance(Reader& reader);

}  // namespace reshard
