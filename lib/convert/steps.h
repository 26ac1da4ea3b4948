// The steps of a conversion after its translation (translation.h) and view (source_view.h), in their order. A step
// gives a value, or changes the one that it takes first, and adds to the notes; nothing else changes. conversion.cc
// calls them; a load (lib/load) is the same steps with the memory of ranks for a target.
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

// Brings the view to its config's shapes as far as `options.repairs` allows, and checks that it is the model. With
// `allow` what does not fit is a note and not an error. Nothing where no config says what the model is.
Result<std::optional<Identity>> repair(SourceView& view, FilePool& files, const RepairOptions& options, bool complete,
                                       bool allow, ConversionNotes& notes);

// Gives the vocabulary the rows that the target framework has.
Status pad_vocabulary(SourceView& view, FilePool& files, const Translation& names, const VocabularyRows& rows,
                      const RankPlacement& on, const Format& format, const RepairOptions& options,
                      ConversionNotes& notes);

// Gives every tensor-parallel rank the key-value head it computes with, where several share one.
Status repeat_heads(SourceView& view, const Translation& names, const RankPlacement& on, const Format& format,
                    ConversionNotes& notes);

// ---- the output's tensors

// Tensors of the view of which the output has one for both, so that they must be equal: a head tied to the embedding,
// the step of parameters that become one.
struct EqualTensors {
  std::size_t kept = 0, left_out = 0;
  std::string otherwise;  // what it means when they are not, a sentence
};

struct OutputTensors {
  std::vector<TargetTensor> tensors;  // in the order of the view; not placed yet
  std::vector<EqualTensors> equal;
  Index converted = 0;      // of the view, that change their dtype
  std::vector<bool> uncut;  // of `tensors`: part of a packed weight, which every rank holds whole
};
Result<OutputTensors> name_tensors(const SourceView& view, const Translation& names, const Typing& typing,
                                   ConversionNotes& notes);

// Gives each tensor its placement. Unsupported if a layout cuts a tensor that is part of a packed weight.
Status place(OutputTensors& output, const SourceView& view, const Model& model, const RankPlacement& on,
             const Format& format, ConversionNotes& notes);

// Objects of an optimizer are named after parameters: where those are split the object is repeated, and where several
// become one their objects must be equal. Without `with_bytes` those that cannot be read are zeros as long as what is
// stored.
Result<std::vector<TargetBlob>> name_blobs(Reader& source, const SourceView& view, const Translation& names,
                                           bool with_bytes);

// LayoutRequest::renamed of an output under other names. Refers to `source` and `names`.
std::function<std::vector<std::string>(const std::string& name)> parameter_names(const Catalog& source,
                                                                                 const Translation& names);

// Where a config says so.
std::optional<HeadCounts> head_counts(const Model& model);

// A target's catalog in the view that its source is in.
Result<Catalog> view_target(const Catalog& target, const Translation& names);

// ---- what lies beside the output

// The files that the format's loaders want (Format::side_files), from beside the config or the source: patterns that
// mean several from beside the config alone. A model's config.json that says of no type what it is (`config_path` is
// empty) is one of them. A link that leads out of the checkpoint is left, and noted; so is what else lies beside a
// model's config.
Result<std::vector<SideFile>> find_side_files(const Catalog& source, const std::string& config_path,
                                              const Format& format, ConversionNotes& notes);

// ---- for formats that show tensors where they lie

// The view under the output's names. Its rows are where they are: in Hugging Face's order, or as stored.
Result<Catalog> name_view(const SourceView& view, const Translation& names, const Typing& typing);

}  // namespace reshard
