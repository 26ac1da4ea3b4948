// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/target.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "formats/colossalai/colossalai.h"
#include "lib/base/text.h"

namespace reshard::colossalai {
namespace {

constexpr double kMiB = 1 << 20;

// Fails unless pp is the only axis of the mesh.
Status check_mesh(const Mesh& mesh) {
  const Index stages = mesh.size("pp");
  if (mesh.ranks() == stages) return {};
  return unsupported(
      "ColossalAI checkpoints hold whole tensors, which its loader cuts for each rank: expected a mesh of "
      "pipeline stages alone (pp=" +
      std::to_string(stages) + "), got " + mesh.to_string());
}

class ColossalaiLayout {
 public:
  explicit ColossalaiLayout(const LayoutRequest& request)
      : request_(request),
        stem_(request.container == Container::kSafetensors ? "model" : "pytorch_model"),
        extension_(container_extension(request.container)) {}

  Result<std::unique_ptr<Target>> lay_out() {
    const Index stages = request_.mesh.size("pp");
    for (Index stage = 0; stage < stages; ++stage) TRY(add_stage(stage, stages));
    Json index = Json::object();
    index.set("metadata", Json::object().set("total_size", static_cast<double>(total_) / kMiB))
        .set("weight_map", weight_map(target_->catalog(), IndexOrder::kAsStored));
    target_->add_text(stem_ + extension_ + ".index.json", to_text(index, 2) + "\n");
    return std::unique_ptr<Target>(std::move(target_));
  }

 private:
  // A stage without tensors still has one file, as in ColossalAI.
  Status add_stage(Index stage, Index stages) {
    std::vector<TargetTensor> held;
    for (const TargetTensor& t : request_.tensors)
      if (stages == 1 || std::max<Index>(0, t.placement->stage) == stage) held.push_back(t);
    Index bytes = 0;
    const auto files = TRY(cut_by_size(held, request_.max_file_bytes, bytes));
    const auto sum = checked_add(total_, bytes);
    if (!sum) return unsupported("a checkpoint of 2^63 bytes or more");
    total_ = *sum;
    for (std::size_t i = 0; i < files.size(); ++i)
      TRY(target_->add_whole(file_name(stage, stages, i), request_.container, files[i]));
    return {};
  }

  std::string file_name(Index stage, Index stages, std::size_t shard) const {
    char number[64];
    if (stages > 1)
      std::snprintf(number, sizeof number, "-stage-%05d-shard-%05zu", static_cast<int>(stage) + 1, shard + 1);
    else
      std::snprintf(number, sizeof number, "-%05zu", shard + 1);
    return stem_ + number + extension_;
  }

  const LayoutRequest& request_;
  std::string stem_, extension_;
  Index total_ = 0;  // bytes
  std::unique_ptr<TensorFilesTarget> target_ = std::make_unique<TensorFilesTarget>(request_.header_metadata);
};

}  // namespace

Result<std::unique_ptr<Target>> lay_out(LayoutRequest request) {
  TRY(check_mesh(request.mesh));
  if (!request.blobs.empty())
    return internal_error("ColossalAI's model files hold tensors only: got object '" +
                          printable(request.blobs.front().name) + "'");
  return ColossalaiLayout(request).lay_out();
}

}  // namespace reshard::colossalai
