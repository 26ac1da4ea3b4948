// SPDX-License-Identifier: Apache-2.0
// The reader of --ckpt-format torch_dist: PyTorch DCP whose tensors hold a parameter of all layers, or of all experts,
// and the optimizer's states in one of four forms (megatron/core/optimizer/distrib_optimizer.py):
//
//   decoder.layers.mlp.linear_fc1.weight [L, 2f, h]               all layers; or one for each: "decoder.layers.7..."
//   decoder.layers.mlp.experts.experts.linear_fc2.weight          [L, E, h, f]
//   decoder.layers.self_attention.linear_qkv.layer_norm_weight    the norm before it, fused into the module or not
//
//   optimizer.state.exp_avg.<name above>            plain and fully_reshardable: shaped like the parameter
//   the same, [pieces along each axis ..., n]       fully_sharded_model_space: each piece is flat
//   optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg [n]
//                                                   dp_reshardable: the flat buffer of a (tp rank, stage)
//
// dist_reader.cc reads the tensors; dist_values.cc reads other values, the optimizer's groups and its steps.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/encoding/torch_file.h"
#include "formats/megatron/arguments.h"
#include "formats/megatron/dist_buffers.h"
#include "formats/megatron/dist_stacks.h"
#include "formats/megatron/megatron.h"
#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/reader.h"

namespace reshard::megatron {

inline bool is_optimizer_key(std::string_view key) { return is_optimizer_word(key.substr(0, key.find('.'))); }

class ShardedReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& directory, const OpenOptions& options);
  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override;
  Result<std::string> blob_bytes(const Blob& blob) override;
  std::string describe(const Blob& blob) override;

 private:
  std::vector<std::string> side_directories() const override;
  Result<std::optional<Json>> made_config() override;

  // Receives a stored piece of a parameter, or of an optimizer's state.
  using Sink =
      std::function<Status(const std::string& name, const Dims& shape, const KeyPath& path, const Fragment& f)>;
  // A tensor, and the indices of the stored tensors that it consists of.
  struct Origin {
    JoinedTensor joined;
    std::vector<std::size_t> inner;
  };
  using Gathered = std::map<std::string, Origin>;
  // How a stored tensor is turned into tensors of the catalog.
  struct Recipe {
    enum class Kind { kAsItIs, kStack, kBuffer } kind = Kind::kAsItIs;
    std::string word;      // the optimizer's state: "exp_avg"
    Dims model_shape;      // of the parameter's stored tensor
    bool is_flat = false;  // its pieces are flat
    Stack stack;
    std::vector<BufferedParameter> placed;  // the parameters in a buffer
  };

  Status read_metadata();
  Status read_common(const std::string& path);
  void find_wrapper();
  void find_recipes();
  void place_buffers(const Gathered& model);
  Status emit(std::size_t inner, const Sink& sink);
  Status emit_piece(const Tensor& tensor, const Recipe& recipe, const Fragment& piece, const Sink& sink);
  Status gather(const std::vector<std::size_t>& inner, Gathered& out);
  Status add_values();
  Status add_groups(pickle::Value groups, Index optimizer);
  Status read_groups(const Blob& blob, Index optimizer);
  Result<std::optional<StoredTensor>> common_step(pickle::Value optimizer) const;
  Status add_steps();
  Result<bool> is_nothing(const Blob& blob);
  Status add_blobs();
  void add_facts();
  std::string optimizer_text() const;
  const Catalog& stored() const { return inner_->catalog(); }

  std::unique_ptr<Reader> inner_;
  Arguments args_;
  Degrees degrees_;
  bool is_tied_ = false, takes_masters_ = false, splits_pieces_ = false, has_common_item_ = false;
  std::optional<TorchFile> common_;
  std::optional<pickle::Value> values_;  // of common_
  std::uint32_t common_file_ = 0;
  std::string wrapper_;                                                   // prefix of the model's names: "module."
  std::deque<pickle::Document> groups_;                                   // of a dp_reshardable optimizer
  std::vector<Recipe> recipes_;                                           // of each stored tensor
  std::map<std::string, std::vector<std::size_t>, std::less<>> origins_;  // of each tensor: its stored tensors
  std::map<std::string, std::size_t> inner_blobs_;
  std::map<Index, bool> nothing_;  // results of is_nothing(), by the item's length
  std::string kind_;               // of the optimizer
};

}  // namespace reshard::megatron
