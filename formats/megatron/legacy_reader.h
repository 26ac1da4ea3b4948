// SPDX-License-Identifier: Apache-2.0
// The reader of per-rank files (--ckpt-format torch). It reads the model (legacy_reader.cc), then the optimizer's
// states (legacy_optimizer.cc), and makes the catalog from both.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/megatron/arguments.h"
#include "formats/megatron/megatron.h"
#include "formats/megatron/names.h"
#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/reader.h"

namespace reshard::megatron {

// A parameter of one rank's model.
struct LegacyParameter {
  std::string name;  // with global numbers of layers and experts
  Cut cut;
  Index rank = 0, ranks = 1;  // along the axis that cuts it
  bool is_expert = false;
  StoredTensor stored;
};

// One rank's directory.
struct LegacyRank {
  Index tp = 0, stage = 0, ep = 0;
  std::string directory;
  std::uint32_t file = 0;
  const TensorFile* content = nullptr;
  std::vector<LegacyParameter> parameters;  // in the model's order
  std::string text() const { return directory; }
};

class LegacyReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& directory, const OpenOptions& options);

 private:
  using Entries = std::vector<const TensorFile::Entry*>;
  struct PlainOptimizer;

  Result<std::optional<Json>> made_config() override;
  Status read(const PathSnapshot& directory, const OpenOptions& options);
  Status find_ranks(const PathSnapshot& directory, const OpenOptions& options);
  Status read_ranks(const PathSnapshot& directory, const OpenOptions& options);
  Status check_ranks() const;
  Status check_rank(const LegacyRank& rank) const;
  Status number_layers();
  Status read_model(LegacyRank& rank);
  Status add_parameters(bool missing);
  Status add_piece(const std::string& name, KeyPath path, DType dtype, const LegacyParameter& parameter,
                   const Dims& local, const std::vector<Fragment>& pieces);
  Status read_plain_optimizer(const LegacyRank& rank);
  static void find_ids(PlainOptimizer& optimizer);
  static void find_groups(const LegacyRank& rank, PlainOptimizer& optimizer);
  bool find_owners(const LegacyRank& rank, PlainOptimizer& optimizer, bool is_one_of_several);
  Status add_states(const LegacyRank& rank, const PlainOptimizer& optimizer);
  Status add_masters(const LegacyRank& rank, const PlainOptimizer& optimizer);
  Status add_state(const LegacyRank& rank, const TensorFile::Entry& entry, const LegacyParameter& of,
                   const std::string& word);
  Status add_word(const LegacyParameter& of, const std::string& word, DType dtype, const Dims& local,
                  const std::vector<Fragment>& pieces);
  Status read_distributed_optimizer(const LegacyRank& rank, const OpenOptions& options);
  Result<bool> read_buffer(const LegacyRank& rank, std::uint32_t file, const Entries& flats,
                           std::optional<Index> unpadded, const std::vector<const LegacyParameter*>& parameters);
  Status add_values(const LegacyRank& rank);
  void leave_out_optimizer(std::string why);
  Index global_layer(const LegacyRank& rank, Index chunk, Index layer) const {
    return first_layer_.at({chunk, rank.stage}) + layer;
  }

  Arguments args_;
  Degrees degrees_;
  bool is_gated_ = false, is_tied_ = false;
  bool takes_masters_ = false;  // masters replace the model's own values
  std::optional<Index> iteration_;
  std::vector<LegacyRank> ranks_;
  std::map<std::pair<Index, Index>, Index> first_layer_;  // by chunk and stage
  std::map<std::string, JoinedTensor> tensors_;
  std::set<std::string> unknown_;  // names of tensors whose cut is unknown
  std::string left_out_;           // why the optimizer's state is left out; empty if it is not
  std::string optimizer_;          // its kind
};

// Returns whether key `i` of a path exists and is this word.
bool is_word(const KeyPath& path, std::size_t i, std::string_view word);
// Returns the number that a key is: a list's position, or decimal text.
std::optional<Index> number_of(const KeyPath::value_type& key);
// Returns the keys from `begin` on as a dotted name.
std::string name_from(const KeyPath& path, std::size_t begin);

// The beginning of a path below "optimizer", which holds {optimizer: {state: {id: {...}}, param_groups},
// fp32_from_fp16_params: [[...], [...]]}, or a list of these if there are several optimizers (dense parameters,
// experts), or torch's own dict for a float32 model.
struct OptimizerKey {
  Index optimizer = 0;
  std::size_t rest = 0;  // index of "state", "param_groups" or "fp32_from_fp16_params" in the path
};
std::optional<OptimizerKey> optimizer_key(const KeyPath& path);

}  // namespace reshard::megatron
