// SPDX-License-Identifier: Apache-2.0
// Merging several checkpoints of one model: every floating-point element of the output is an expression of the
// corresponding elements of the sources, whatever their formats, layouts, names and dtypes. An exclusive or covers all
// elements; the sources then have the same dtypes.
//
// The first source is that of the conversion: dtypes and the files next to the weights (config, tokenizer) are taken
// from it. The other sources take the same steps, to the same names, rows and shapes.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/convert/weights/expression.h"
#include "lib/device/digest.h"
#include "lib/engine/run_options.h"
#include "lib/source/computed_source.h"

namespace reshard {

struct MergeSource {
  std::string name;          // in the expression
  std::string path;          // as the user gave it
  Reader* reader = nullptr;  // null: not open yet
};

struct MergeOptions {
  std::vector<MergeSource> sources;  // the conversion's own first
  std::string expression;
  bool in_double = false;       // compute in float64 instead of float32
  bool applies_deltas = false;  // the sources after the first are deltas (delta_chain.h), and are checked as such
  std::string
      others_from;  // the source of tensors that are not floating-point; empty: they must be equal in all sources
};

// Opens the sources after the first. Published deltas get the shapes of the first (published_delta.h). The result must
// outlive `merge`, and `first` the result.
Result<std::vector<OpenCheckpoint>> open_others(MergeOptions& merge, Reader& first, const Opener& open,
                                                const OpenOptions& how);

struct Merge {
  MergeOptions options;
  Expression expression;
  std::optional<std::size_t> others_from;  // as in the options
  Catalog stored;                          // the first source's view, in its stored dtypes
  // For each tensor of the first view, its numbers in the views of all sources.
  std::vector<std::vector<std::size_t>> numbers;
};

// Matches the tensors of all sources by name. `views` are the sources' views, in the order of `options.sources`. Fails
// (unsupported), naming tensors, if a source lacks a tensor that another has, or has it in another shape; with a usage
// error if the expression or `others_from` names an unknown source.
Result<Merge> match_sources(const MergeOptions& options, const std::vector<const Catalog*>& views);

// Sets the dtypes of the merged tensors of `view`, the first source's, to those of the target, so that values are
// rounded only once.
void write_as(const Merge& merge, const Catalog& target_view, Catalog& view);

// Reads the tensors that are not floating-point and fails if they must be equal but differ. `sources` as in
// set_merged().
Status check_not_merged(const Merge& merge, const std::vector<TensorSource*>& sources, RunOptions run);

// Digests of the data read from each tensor of each source, in its stored dtype. Thread-safe.
class MergeDigests {
 public:
  explicit MergeDigests(const Merge& merge);
  void add(std::size_t tensor, std::size_t source, const Digest& digest);
  const std::vector<Digest>& of(std::size_t tensor) const { return digests_[tensor]; }
  Status add_up(Transport* ranks);  // of all ranks; all ranks must call it

 private:
  std::mutex mutex_;
  std::vector<std::vector<Digest>> digests_;  // by tensor of the first view, and source
};

// Sets the tensors of `merged`, the first source's view, to the values of the expression. All arguments must outlive
// `merged`.
void set_merged(const Merge& merge, const std::vector<TensorSource*>& sources, MergeDigests& digests,
                ComputedSource& merged);

// Returns the bytes of memory that each thread needs for a merge.
Index merge_bytes(const Merge& merge);

}  // namespace reshard
