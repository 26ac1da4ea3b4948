// Several checkpoints of one model made into one: every floating-point element is an expression of the elements in its
// place in the sources, whatever format, layout, names and dtype each has.
//
// The first source is the conversion's own: what is written beside the weights (config, tokenizer) is from it, and so
// are its dtypes. The others go through the same steps, to the same names, rows and shapes.
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
  bool in_double = false;   // elements are reckoned in float64, else in float32
  std::string others_from;  // the source of tensors that are no floats; empty: they must be equal in all of them
};

// Opens the sources after the first. The sources refer to what is returned.
Result<std::vector<OpenCheckpoint>> open_others(MergeOptions& merge, Reader& first, const Opener& open,
                                                const OpenOptions& how);

struct Merge {
  MergeOptions options;
  Expression expression;
  std::optional<std::size_t> others_from;  // as in the options
  Catalog stored;                          // the first source's view, in the dtypes that it is stored in
  // Of each tensor of the first view, its number in the views of all sources.
  std::vector<std::vector<std::size_t>> numbers;
};

// Matches the tensors of all sources by name. `views` are the sources' views, in the order of `options.sources`. Fails
// (unsupported), naming tensors, if a source lacks a tensor that another has, or has it in another shape; with a usage
// error if the expression or `others_from` names an unknown source.
Result<Merge> match_sources(const MergeOptions& options, const std::vector<const Catalog*>& views);

// Gives the merged tensors of `view`, the first source's, the dtypes that they are written in: they are rounded once.
void write_as(const Merge& merge, const Catalog& target_view, Catalog& view);

// Compares the tensors that are no floats, as far as they must be equal. Reads them. `sources` as in set_merged().
Status check_not_merged(const Merge& merge, const std::vector<TensorSource*>& sources, RunOptions run);

// Digests of what was read of each tensor of each source, in the dtype it is stored in. Thread-safe.
class MergeDigests {
 public:
  explicit MergeDigests(const Merge& merge);
  void add(std::size_t tensor, std::size_t source, const Digest& digest);
  const std::vector<Digest>& of(std::size_t tensor) const { return digests_[tensor]; }
  Status add_up(Transport* ranks);  // of all ranks, each of which calls it

 private:
  std::mutex mutex_;
  std::vector<std::vector<Digest>> digests_;  // by tensor of the first view, and source
};

// Makes the tensors of `merged`, the first source's view, what the expression says. Refers to all.
void set_merged(const Merge& merge, const std::vector<TensorSource*>& sources, MergeDigests& digests,
                ComputedSource& merged);

// Memory that each thread takes for it, bytes.
Index merge_bytes(const Merge& merge);

}  // namespace reshard
