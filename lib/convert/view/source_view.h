// The second and third step of a conversion: which tensors of the source take part, and how the plan sees them.
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

// ---- which tensors take part

// Whether the name, the source's, is among those that were asked for.
bool selects(const Selection& selection, std::string_view name);

struct Selected {
  std::vector<std::size_t> tensors, blobs;  // of the source's catalog
  bool complete = true;                     // a model takes part, and no filter and no fault took tensors out
};
// `without_faulty`: tensors that are not stored exactly once are left out, and with `files_too` those whose files are
// damaged. A usage error where none is left.
Result<Selected> select(const Catalog& source, const Selection& selection, const Format& format, bool without_faulty,
                        bool files_too, ConversionNotes& notes);

// ---- the source as the plan sees it

struct SourceView {
  Catalog catalog;  // the canonical view (view.h); the source's where nothing is renamed, or its plain keys
  // What the source calls the tensors, by canonical names, where that is another name; and those of tied heads that it
  // stores.
  struct Native {
    std::string name, key;
  };
  std::unordered_map<std::string, Native> natives;
  std::unordered_set<std::size_t> applied = {};   // of quantized ones, that become others
  std::unordered_set<std::size_t> computed = {};  // what is made of others as it is read, in its dtype (the same)
  std::unordered_set<std::size_t> values = {};    // tensors that the output has as one value (adam.h)
  // Tensors of packed weights, and scales of activations and caches beside them, by canonical name.
  struct Packed {
    std::string name;  // of the weight; empty for scales of activations and caches
    Packing packing = Packing::kFloat8;
    bool is_matrix = false;  // its elements are the weight's, but for the scales
  };
  std::unordered_map<std::string, Packed> packed = {};
  bool is_known_to_families(const std::string& canonical) const;  // of one that is packed
  bool is_stored(const std::string& canonical) const;             // of a tied head
  const std::string& native(const std::string& canonical) const;  // its name in the source
  const std::string& key(const std::string& canonical) const;     // and its plain key there
};
// Fails if the selection has some tensors of a packed weight and leaves out others.
Status check_packed_whole(const Catalog& source, const Selected& selected, const PackedWeights& packed);

// Of located tensors the extents are checked once more: now the payloads' own headers have spoken.
Result<SourceView> view_source(const Catalog& source, const Selected& selected, const Translation& names,
                               bool keep_unknown, bool is_located, ConversionNotes& notes);

}  // namespace reshard
