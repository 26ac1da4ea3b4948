// SPDX-License-Identifier: Apache-2.0
// What a caller asks of a checkpoint: which tensors, under which names, in which dtypes, padded how, and placed on
// which ranks. Each step of a conversion (steps.h) takes the group that concerns it.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/text.h"
#include "lib/checkpoint/format.h"
#include "lib/convert/view/repair.h"
#include "lib/convert/view/row_edits.h"
#include "lib/layout/descriptor.h"
#include "lib/model/model.h"

namespace reshard {

// Which tensors and objects take part.
struct Selection {
  std::vector<std::string> include, exclude;  // globs over the source's names
  std::string part;                           // of a training state (is_of_part); empty: all
  bool keep_unknown = false;                  // tensors that the family does not know are carried as they are
  bool merge_adapter = false;                 // an adapter is added to the weights and takes no part itself
};

// The names of the output's tensors, and the order of their rows.
struct Naming {
  std::optional<Convention> convention;  // nothing: the source's own, or the format's default
  bool keep_names = false;               // keeps the source's own names, even if the format renames by default
  bool changed_names = false;            // --strip-prefix or --rename was given
  bool common_rows = false;              // the plan uses common names and rows even if it need not
};

// The type of matrices that get scales (quantizations.h).
enum class Quantization { kNone, kFp8Block, kFp8Tensor, kMxfp4 };
inline constexpr std::array<std::pair<std::string_view, Quantization>, 3> kQuantizations = {
    {{"fp8-block", Quantization::kFp8Block},
     {"fp8-tensor", Quantization::kFp8Tensor},
     {"mxfp4", Quantization::kMxfp4}}};  // as in --quantize

struct DtypeOptions {
  std::optional<DType> dtype;           // floating-point model tensors become this
  std::vector<std::string> keep_dtype;  // globs over the source's names
  Quantization quantize = Quantization::kNone;

  // Returns whether a tensor with this source name and canonical name keeps its dtype.
  bool keeps(std::string_view native, std::string_view canonical) const {
    return any_glob_matches(keep_dtype, native) || any_glob_matches(keep_dtype, canonical);
  }
};

// Padding of the vocabulary: as the layout says, or to a multiple of `vocab_divisible_by` x tp; 0: none.
struct VocabularyRows {
  std::optional<PaddingFill> vocab_padding;  // content of the added rows; nothing: as the layout says
  Index vocab_divisible_by = 0;
};

// Where the output is stored: the mesh, and the layout on it.
struct RankPlacement {
  Mesh mesh;
  std::optional<LayoutDescriptor> layout;  // its mesh is `mesh`; nothing: the family's rules (Placer)
};

// What a caller asks of a checkpoint, for a conversion or a load.
struct Request {
  Selection selection;
  Naming naming;
  DtypeOptions typing;
  VocabularyRows vocabulary;
  RankPlacement placement;
  ModelChoice model;
  std::string config_path;  // config.json; empty: the one next to the checkpoint (find_config_file)
  std::string spool = ".";  // directory for decoded copies of compressed items
};

}  // namespace reshard
