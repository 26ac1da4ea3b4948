// SPDX-License-Identifier: Apache-2.0
// The second and third step of a conversion: the selection of tensors, and the view of the source that the plan uses.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lib/convert/view/conversion_notes.h"
#include "lib/convert/view/request.h"
#include "lib/convert/view/translation.h"

namespace reshard {

// ---- selection

// Returns whether the selection includes `name`, a name of the source.
bool selects(const Selection& selection, std::string_view name);

// Fails (usage) if the source contains no tensors.
Status check_has_tensors(const Catalog& source);

struct Selected {
  std::vector<std::size_t> tensors, blobs;  // of the source's catalog
  bool complete = true;                     // it contains a model, and no filter or fault removed tensors
};
// Selects tensors and objects. With `without_faulty`, leaves out tensors that are not stored exactly once and, with
// `files_too`, those whose files are damaged. Fails (usage) if no tensor is left.
Result<Selected> select(const Catalog& source, const Selection& selection, const Format& format, bool without_faulty,
                        bool files_too, ConversionNotes& notes);

// ---- the view

struct SourceView {
  Catalog catalog;  // canonical names (view.h); the source's names or plain keys if nothing is renamed
  // Names of the source by canonical name, for tensors whose names differ and for tied heads that the source stores.
  struct SourceName {
    std::string name, key;
  };
  std::unordered_map<std::string, SourceName> natives;
  std::unordered_set<std::size_t> applied = {};   // quantized tensors and scales that are replaced by computed ones
  std::unordered_set<std::size_t> computed = {};  // tensors computed from others as they are read, in their own dtype
  std::unordered_set<std::size_t> values = {};    // tensors that the output stores as one value (adam.h)
  // Tensors of packed weights, and scales of activations and caches, by canonical name.
  struct Packed {
    std::string name;  // of the weight; empty for scales of activations and caches
    Packing packing = Packing::kFloat8;
    bool is_matrix = false;  // its elements are those of the weight, except for the scales
  };
  std::unordered_map<std::string, Packed> packed = {};
  bool is_known_to_families(const std::string& canonical) const;  // for a packed tensor
  bool is_stored(const std::string& canonical) const;             // false for a tied head that only the view has
  const std::string& native(const std::string& canonical) const;  // its name in the source
  const std::string& key(const std::string& canonical) const;     // and its plain key there
};
// Fails if the selection has some tensors of a packed weight and leaves out others.
Status check_packed_whole(const Catalog& source, const Selected& selected, const PackedWeights& packed);

// Makes the view of the selected tensors. With `is_located`, validates the extents again, because the headers of the
// payloads are known now.
Result<SourceView> view_source(const Catalog& source, const Selected& selected, const Translation& names,
                               bool keep_unknown, bool is_located, ConversionNotes& notes);

}  // namespace reshard
