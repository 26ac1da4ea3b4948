// SPDX-License-Identifier: Apache-2.0
// The steps of a conversion that follow its translation (translation.h) and view (source_view.h), in the order in which
// make_draft() takes them. A step returns a value, or changes its first argument, and adds to the notes; it has no
// other effect. A load (lib/load) takes the same steps with the memory of ranks as its target.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/checkpoint/side_files.h"
#include "lib/convert/view/request.h"
#include "lib/convert/view/source_view.h"
#include "lib/convert/view/translation.h"
#include "lib/model/view.h"

namespace reshard {

// ---- rows of the view

// Changes the rows of the view to the shapes of config.json as far as `options.repairs` allows, and checks that the
// view is the model that config.json describes. Fails if it is not; with `allow` that is a note. Returns nothing if
// there is no config of a known family.
Result<std::optional<Identity>> repair(SourceView& view, FilePool& files, const RepairOptions& options, bool complete,
                                       bool allow, ConversionNotes& notes);

// Pads the vocabulary to the number of rows that the target framework has.
Status pad_vocabulary(SourceView& view, FilePool& files, const Translation& names, const VocabularyRows& rows,
                      const RankPlacement& on, const Format& format, const RepairOptions& options,
                      ConversionNotes& notes);

// Repeats key-value heads so that every tensor-parallel rank has the head it computes with, if several ranks share one.
Status repeat_heads(SourceView& view, const Translation& names, const RankPlacement& on, const Format& format,
                    ConversionNotes& notes);

// ---- the output's tensors

// Two tensors of the view that the output stores as one, so that they must be equal: a head tied to the embedding, or
// the steps of two parameters that become one.
struct EqualTensors {
  std::size_t kept = 0, left_out = 0;
  std::string otherwise;  // what it means if they differ, a sentence
};

struct OutputTensors {
  std::vector<TargetTensor> tensors;  // in the order of the view; not placed yet
  std::vector<EqualTensors> equal;
  Index converted = 0;  // number of tensors that change their dtype
  std::vector<bool>
      uncut;  // for each of `tensors`: whether it is part of a packed weight, which every rank holds whole
};
Result<OutputTensors> name_tensors(const SourceView& view, const Translation& names, const DtypeOptions& typing,
                                   ConversionNotes& notes);

// Sets the placement of each tensor. Fails (unsupported) if a layout shards a tensor that is part of a packed weight.
Status place(OutputTensors& output, const SourceView& view, const Model& model, const RankPlacement& on,
             const Format& format, ConversionNotes& notes);

// Returns the output's objects. Objects of an optimizer are named after parameters: if a parameter is split, its object
// is repeated; if several become one, their objects must be equal. Without `with_bytes`, objects that cannot be read
// are zeros of the stored length.
Result<std::vector<TargetBlob>> name_blobs(Reader& source, const SourceView& view, const Translation& names,
                                           bool with_bytes);

// Returns LayoutRequest::renamed for an output with other names. `source` and `names` must outlive it.
std::function<std::vector<std::string>(const std::string& name)> parameter_names(const Catalog& source,
                                                                                 const Translation& names);

// Returns the numbers of heads, if config.json gives them.
std::optional<HeadCounts> head_counts(const Model& model);

// Returns the catalog of a target under the canonical names of its source's view.
Result<Catalog> view_target(const Catalog& target, const Translation& names);

// ---- files next to the output

// Returns the files that the format's loaders need (Format::side_files). A name is looked for next to config.json, in
// the source's directory and in its parent; the first file counts. A pattern with wildcards is looked for next to
// config.json only. A config.json that does not give a model type (`config_path` is empty) is one of these files.
// Notes, and does not return, links that lead out of the checkpoint and other files next to config.json.
Result<std::vector<SideFile>> find_side_files(const Catalog& source, const std::string& config_path,
                                              const Format& format, ConversionNotes& notes);

// ---- for formats that refer to tensors in place

// Returns the view under the output's names. Rows keep their order: Hugging Face's, or the stored one.
Result<Catalog> name_view(const SourceView& view, const Translation& names, const DtypeOptions& typing);

}  // namespace reshard
