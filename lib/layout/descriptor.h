// SPDX-License-Identifier: Apache-2.0
// The layout descriptor: which mesh trained a model, how each tensor is sharded on it, how the vocabulary is padded,
// and which pipeline stage holds what. It is a JSON file that people write, `reshard layout` prints for a checkpoint,
// and convert and verify read. docs/layout.md describes its members.
//
// Patterns select tensors: globs with number ranges, "layers.{0..15}.attention.w[qkv].weight" (glob_match()).
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/json.h"
#include "lib/layout/layout.h"
#include "lib/layout/stages.h"

namespace reshard {

// How the tensors that match the names are sharded.
struct TensorRule {
  std::vector<std::string> names;  // patterns
  std::vector<Split> splits;       // applied left to right; none: every rank holds the whole tensor

  friend bool operator==(const TensorRule&, const TensorRule&) = default;
};

enum class PaddingContent { kUnknown, kZero, kInitialised };    // the values of rows that no token uses
std::string_view padding_content_name(PaddingContent content);  // "zero"

// The rows (dimension 0) of the embedding and the head. Unknown numbers are absent.
struct Vocabulary {
  std::vector<std::string> tensors;  // patterns
  std::optional<Index> size;         // without padding
  // make_vocab_size_divisible_by: rows are padded to a multiple of this times tp.
  std::optional<Index> divisible_by;
  std::optional<Index> padded_size;  // with padding
  PaddingContent padding = PaddingContent::kUnknown;

  friend bool operator==(const Vocabulary&, const Vocabulary&) = default;
};

// Which stage holds what: either a rule for layers plus lists for the other tensors, or one list for each stage. A
// tensor that is not mentioned is held by every stage.
struct Pipeline {
  std::optional<StageRule> rule;
  std::vector<std::string> first, last;  // with a rule: patterns of the tensors outside the layers
  // Without a rule: the patterns of each stage. The first stage that matches holds the tensor.
  std::vector<std::vector<std::string>> stages;

  friend bool operator==(const Pipeline&, const Pipeline&) = default;
};

// The key and value projections if tp exceeds the number of their heads, so that several tp ranks hold the same head.
struct KvHeads {
  std::vector<std::string> tensors;  // patterns
  Index replication = 1;             // number of ranks that hold each head

  friend bool operator==(const KvHeads&, const KvHeads&) = default;
};

enum class StoredAs {
  kShards,  // each file holds what its rank owns
  kWhole,   // files hold whole tensors, whatever mesh trained them
};

// The evidence for one statement of a descriptor that was inferred from a checkpoint.
struct LayoutEvidence {
  std::string about;       // "tp=4", "vocabulary"
  std::string confidence;  // "certain", "likely", "unknown"
  std::string because;     // a clause

  friend bool operator==(const LayoutEvidence&, const LayoutEvidence&) = default;
};

struct LayoutDescriptor {
  std::string name;
  std::string description;
  std::optional<Mesh> mesh;  // in rank order; nothing: set later by with_mesh()
  StoredAs stored_as = StoredAs::kShards;
  std::vector<TensorRule> tensors;  // the first rule whose pattern matches applies
  std::optional<Vocabulary> vocabulary;
  std::optional<Pipeline> pipeline;
  std::optional<KvHeads> kv_heads;
  std::vector<LayoutEvidence> evidence;
  std::vector<std::string> notes;  // sentences

  // Reads a descriptor strictly: unknown members, unknown axes, an axis that cuts a tensor twice, and numbers out of
  // range are errors that name the path and the member. `path` is only used in messages.
  static Result<LayoutDescriptor> parse(std::string_view text, std::string_view path);
  // Returns JSON that parse() reads back as an equal descriptor.
  Json to_json() const;

  // Returns this descriptor on a mesh. A usage error if it already has one, or lists a different number of stages.
  Result<LayoutDescriptor> with_mesh(Mesh given) const;

  // Returns the placement of a tensor on the ranks. `shape` is the shape on the ranks: if several ranks hold the same
  // heads, every copy counts. `layers` is the model's number of layers, used only by a pipeline rule. Fails if no
  // pattern matches, if a split's dimension does not exist or is not divisible by its groups, or (unsupported) if the
  // ranks hold padding rows that the tensor lacks.
  Result<Placement> place(std::string_view tensor, const Dims& shape, Index layers) const;
  // Returns the placement in the files: the same, but uncut if files hold whole tensors.
  Result<Placement> place_in_files(std::string_view tensor, const Dims& shape, Index layers) const;

  // Returns the number of vocabulary rows on the ranks, with padding, of a tensor with `rows` rows. A size in the
  // descriptor takes precedence over `rows`. Requires a vocabulary and a mesh. A usage error if the result is out of
  // range.
  Result<Index> padded_rows(Index rows) const;

  friend bool operator==(const LayoutDescriptor&, const LayoutDescriptor&) = default;
};

// The descriptors built into the program: samples/layouts/<name>.json.
struct BuiltinLayout {
  std::string_view name, text;
};
std::span<const BuiltinLayout> builtin_layouts();
const BuiltinLayout* find_builtin_layout(std::string_view name);  // null if there is none
std::string builtin_layout_names();                               // "colossalai-llama, hf, ..."

// Loads a built-in layout or one from a file, and puts it on `mesh` unless that is empty. A usage error if the layout
// already has a mesh. The result has no mesh if neither has one.
Result<LayoutDescriptor> load_layout(const std::string& name_or_file, const std::string& mesh);

}  // namespace reshard
