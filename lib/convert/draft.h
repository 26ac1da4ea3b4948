// SPDX-License-Identifier: Apache-2.0
// The first half of a conversion: everything about the output but its files. See steps.h for the steps.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/convert/steps.h"
#include "lib/convert/weights/adapter.h"
#include "lib/convert/weights/merge.h"
#include "lib/convert/weights/requantization.h"
#include "lib/convert/weights/unpacking.h"
#include "lib/convert/weights/value_changes.h"
#include "lib/engine/run_options.h"
#include "lib/output/output.h"

namespace reshard {

// Problems of the source that the user asked to ignore.
struct AllowedProblems {
  bool cover = false;   // leave out tensors that are not stored exactly once or whose files are damaged
  bool config = false;  // write tensors that contradict config.json as they are
};

struct ConversionOptions : Request {
  std::string source_path;  // as the user gave it, for the manifest
  Repairs repairs;
  Reader* donor = nullptr;  // checkpoint that provides lost rows; null: none
  AdapterOptions adapter;
  std::optional<MergeOptions> merge;  // merges this source with others
  Container container = Container::kSafetensors;
  Index max_file_bytes = kUsualFileBytes;
  Compression compression;  // for formats that can
  AllowedProblems allow;
  bool takes_delta = false;    // the source is a delta, to be applied to another source
  bool takes_parts = false;    // a selection may have some tensors of a packed weight without the others
  bool metadata_only = false;  // plan without looking into the data files
  bool sizes_only = false;     // with metadata_only: plans names and sizes only, without locating the source's elements
  Resume resume = Resume::kAuto;
  Index group_bytes = ResumeOptions().group_bytes;
  std::function<void(const std::string& note)> on_note{};  // called if an earlier run left something
  RunOptions run;
};

// The output before a format has laid it out: names, dtypes, shapes and placement of its tensors.
struct Draft {
  // Returns whether the values of some tensors are computed when they are read: merged, dequantized, quantized, changed
  // by an adapter or by the output's convention.
  bool computes() const;

  ConfigFile config;                     // of the model without packed weights, if they are unpacked
  std::unique_ptr<Unpacking> unpacking;  // null: the source has no packed weights, or they stay packed
  Translation names;
  SourceView view;
  std::optional<Identity> identity;  // the result of the comparison with config.json; nothing: not compared
  std::optional<Adapter> adapter;    // the adapter to write or merge
  Requantization requantized;        // weights computed from other weights
  ValueChanges changes;              // values that the output's convention stores otherwise
  // The view before columns were divided as the output stores them (divide_columns()), in which values are computed.
  // Null: none are computed, or nothing was divided.
  std::unique_ptr<Catalog> undivided;
  std::optional<Index> step;  // of the optimizer, for StateSupport::kAdam
  OutputTensors output;       // placed; empty for a format that shows tensors in place
  // Of a merge: how its sources match, and the drafts of those after the first.
  std::optional<Merge> merge;
  std::vector<std::shared_ptr<const Draft>> others;
  std::vector<SideFile> side_files;
  ConversionNotes notes;
};

// Takes the steps of a conversion in their order (steps.h) and locates the tensors that take part. Fails with the error
// of the first step that fails; nothing is written.
Result<Draft> make_draft(Reader& source, const Format& format, const ConversionOptions& options);

// Divides the columns of tensors in `catalog`, which has canonical names, if the source of `draft` stores them as
// separate tensors.
Status divide_as_source_of(const Draft& draft, Catalog& catalog);

// Reads the source tensors that the output merges into one (a tied head, a step) and fails if they differ. Returns the
// number of recorded checksums verified on those left out.
Result<Index> check_equal_tensors(const Draft& draft, FilePool& files, RunOptions run);

}  // namespace reshard
