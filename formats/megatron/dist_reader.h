// --ckpt-format torch_dist: PyTorch DCP whose tensors hold all layers, or all experts, of a parameter at once, and the
// optimizer's in one of four ways:
//
//   decoder.layers.mlp.linear_fc1.weight [L, 2f, h]               every layer's, or "decoder.layers.7..." each
//   decoder.layers.mlp.experts.experts.linear_fc2.weight          [L, E, h, f]
//   decoder.layers.self_attention.linear_qkv.layer_norm_weight    the norm before it, whether or not it is part of it
//
//   optimizer.state.exp_avg.<name above>            plain, and fully_reshardable: as the parameter
//   the same, [pieces along each axis ..., n]       fully_sharded_model_space: each piece flat
//   optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg [n]
//                                                   dp_reshardable: the flat buffer of a (tp rank, stage)
//
// What its tensors are made of is read by dist_reader.cc; what is no tensor, and the optimizer's groups and steps, by
// dist_values.cc.
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

  // Receives a stored piece of a parameter, or of an optimizer's state of one.
  using Sink =
      std::function<Status(const std::string& name, const Dims& shape, const KeyPath& path, const Fragment& f)>;
  // A tensor, and the stored ones it is made of.
  struct Origin {
    JoinedTensor joined;
    std::vector<std::size_t> inner;
  };
  using Gathered = std::map<std::string, Origin>;
  // What becomes of a stored tensor.
  struct Recipe {
    enum class Kind { kAsItIs, kStack, kBuffer } kind = Kind::kAsItIs;
    std::string word;      // of optimizer state, "exp_avg"
    Dims model_shape;      // of the parameter's stored tensor
    bool is_flat = false;  // pieces of it, each flat
    Stack stack;
    std::vector<Placed> placed;  // in a buffer
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
  void tell();
  std::string optimizer_text() const;
  const Catalog& stored() const { return inner_->catalog(); }

  std::unique_ptr<Reader> inner_;
  Arguments args_;
  Degrees degrees_;
  bool is_tied_ = false, takes_masters_ = false, splits_pieces_ = false, has_common_item_ = false;
  std::optional<TorchFile> common_;
  std::optional<pickle::Value> values_;  // of common_
  std::uint32_t common_file_ = 0;
  std::string wrapper_;                                                   // before the names of the model: "module."
  std::deque<pickle::Document> groups_;                                   // of a dp_reshardable optimizer
  std::vector<Recipe> recipes_;                                           // of each stored tensor
  std::map<std::string, std::vector<std::size_t>, std::less<>> origins_;  // of each tensor, stored ones
  std::map<std::string, std::size_t> inner_blobs_;
  std::map<Index, bool> nothing_;  // by the length of an item
  std::string kind_;               // of the optimizer
};

}  // namespace reshard::megatron
