// The layout descriptor: which mesh trained a model, how each tensor lies on it, how the vocabulary is padded, which
// pipeline stage holds what. A JSON file that people write, that `reshard layout` prints for a checkpoint, and that
// convert and verify take; docs/layout.md describes it member by member.
//
// Tensors are picked by patterns: globs with number ranges, "layers.{0..15}.attention.w[qkv].weight" (glob_match).
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

// How the tensors of these names are cut.
struct TensorRule {
  std::vector<std::string> names;  // patterns
  std::vector<Split> splits;       // applied left to right; none: every rank holds all of it

  friend bool operator==(const TensorRule&, const TensorRule&) = default;
};

enum class PaddingContent { kUnknown, kZero, kInitialised };    // what the rows that no token uses hold
std::string_view padding_content_name(PaddingContent content);  // "zero"

// The rows of embedding and head (dimension 0). A number that is not known is absent.
struct Vocabulary {
  std::vector<std::string> tensors;   // patterns
  std::optional<Index> size;          // true rows
  std::optional<Index> divisible_by;  // make_vocab_size_divisible_by: rows are padded to a multiple of this times tp
  std::optional<Index> padded_size;   // rows after that
  PaddingContent padding = PaddingContent::kUnknown;

  friend bool operator==(const Vocabulary&, const Vocabulary&) = default;
};

// Which stage holds what: either a rule for layers and lists for the rest, or a list for each stage. A tensor that
// nothing here mentions is held by every stage.
struct Pipeline {
  std::optional<StageRule> rule;
  std::vector<std::string> first, last;          // with a rule: patterns of tensors outside the layers
  std::vector<std::vector<std::string>> stages;  // without one: patterns of each stage; the first stage that fits

  friend bool operator==(const Pipeline&, const Pipeline&) = default;
};

// Key and value projections when tp exceeds the number of their heads: several tp ranks hold the same head.
struct KvHeads {
  std::vector<std::string> tensors;  // patterns
  Index replication = 1;             // ranks that hold each head

  friend bool operator==(const KvHeads&, const KvHeads&) = default;
};

enum class StoredAs {
  kShards,  // a file holds what its rank owns
  kWhole,   // files hold whole tensors, however the ranks that trained them were laid out
};

// Why a descriptor that was read off a checkpoint says what it says.
struct LayoutEvidence {
  std::string about;       // "tp=4", "vocabulary"
  std::string confidence;  // "certain", "likely", "unknown"
  std::string because;     // a clause

  friend bool operator==(const LayoutEvidence&, const LayoutEvidence&) = default;
};

struct LayoutDescriptor {
  std::string name;
  std::string description;
  std::optional<Mesh> mesh;  // in rank order; nothing: to be given with with_mesh
  StoredAs stored_as = StoredAs::kShards;
  std::vector<TensorRule> tensors;  // the first whose pattern matches counts
  std::optional<Vocabulary> vocabulary;
  std::optional<Pipeline> pipeline;
  std::optional<KvHeads> kv_heads;
  std::vector<LayoutEvidence> evidence;
  std::vector<std::string> notes;  // sentences

  // Reads a descriptor strictly: members nobody knows, axes that are none, an axis that cuts a tensor twice, numbers
  // out of range are errors that name path and member. `path` only serves the messages.
  static Result<LayoutDescriptor> parse(std::string_view text, std::string_view path);
  // What parse reads back as an equal descriptor.
  Json to_json() const;

  // The same on a mesh. A usage error when the descriptor has one already, or lists other stages than the mesh has.
  Result<LayoutDescriptor> with_mesh(Mesh given) const;

  // How a tensor lies on the ranks. `layers` is the model's number of layers; only a pipeline rule asks for it. Errors:
  // no pattern matches, a split's dimension does not exist or is not divided by its groups, or (unsupported) ranks hold
  // padding rows that the tensor has not. `shape` is that on the ranks: of heads that several hold, all copies count.
  Result<Placement> place(std::string_view tensor, const Dims& shape, Index layers) const;
  // How it lies in the files: the same, but uncut where files hold whole tensors.
  Result<Placement> place_in_files(std::string_view tensor, const Dims& shape, Index layers) const;

  // Rows of a vocabulary tensor on the ranks, padding included, when it truly has `rows` (used where the descriptor
  // gives no true size). Only with a vocabulary and a mesh. A usage error when the product is out of range.
  Result<Index> padded_rows(Index rows) const;

  friend bool operator==(const LayoutDescriptor&, const LayoutDescriptor&) = default;
};

// The descriptors that come with the program: samples/layouts/<name>.json.
struct BuiltinLayout {
  std::string_view name, text;
};
std::span<const BuiltinLayout> builtin_layouts();
const BuiltinLayout* find_builtin_layout(std::string_view name);  // null: there is none
std::string builtin_layout_names();                               // "colossalai-llama, hf, ..."

// A layout by the name of a built-in or from a file, on the mesh that `mesh` gives where it is not empty: a usage error
// when the layout has one. Its mesh is absent where neither has.
Result<LayoutDescriptor> load_layout(const std::string& name_or_file, const std::string& mesh);

}  // namespace reshard
