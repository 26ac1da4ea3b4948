// How files of ranks (--ckpt-format torch) are read: the model (legacy_reader.cc), then what the optimizer has of it
// (legacy_optimizer.cc), then both become the catalog.
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
  std::string name;  // numbered through
  Cut cut;
  Index rank = 0, ranks = 1;  // along the axis that cuts it
  bool is_expert = false;
  StoredTensor stored;
};

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
  bool takes_masters_ = false;  // in the place of the model's own
  std::optional<Index> iteration_;
  std::vector<LegacyRank> ranks_;
  std::map<std::pair<Index, Index>, Index> first_layer_;  // of a chunk of a stage
  std::map<std::string, JoinedTensor> tensors_;
  std::set<std::string> unknown_;  // names of which nothing tells how they are cut
  std::string left_out_;           // why the optimizer's state is
  std::string optimizer_;          // its kind
};

// Paths of values in a rank's file: whether a part of one is that word, the number that it is, the rest as a name.
bool is_word(const KeyPath& path, std::size_t i, std::string_view word);
std::optional<Index> number_of(const KeyPath::value_type& key);
std::string name_from(const KeyPath& path, std::size_t begin);

// {optimizer: {state: {id: {...}}, param_groups}, fp32_from_fp16_params: [[...], [...]]}, of several optimizers (dense
// parameters, experts) a list of these; of a float32 model torch's own dict.
struct OptimizerKey {
  Index optimizer = 0;
  std::size_t rest = 0;  // of the path: where "state", "param_groups" or "fp32_from_fp16_params" stands
};
std::optional<OptimizerKey> optimizer_key(const KeyPath& path);

}  // namespace reshard::megatron
