// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <set>

#include "formats/tensor_files/joined_tensor.h"
#include "formats/tensor_files/rank_parts.h"
#include "formats/vllm/layout.h"
#include "formats/vllm/vllm.h"
#include "lib/base/text.h"
#include "lib/model/config.h"
#include "lib/model/family.h"
#include "lib/model/parameters.h"

namespace reshard::vllm {
namespace {

// The reader. It joins the workers' parameters to the model that the config.json next to them describes.
class VllmReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options) {
    catalog_.root = place.path();
    stages_ = place.has_file(file_name({}, 1, 0)) ? 1 : 2;
    const auto has = [&](const Worker& worker, Index part) { return place.has_file(file_name(worker, stages_, part)); };
    if (stages_ > 1)
      while (has({stages_, 0}, 0)) ++stages_;
    for (Index stage = 0; stage < stages_; ++stage) {
      Index rank = 0;
      for (; rank == 0 || (stage == 0 ? has({stage, rank}, 0) : rank < ranks_); ++rank)
        TRY(read_worker(place, {stage, rank}, options));
      ranks_ = rank;
    }
    const VllmLayout layout = TRY(find_layout(Families(options.own_family)));
    for (const TargetTensor& t : layout.request().tensors) tensors_.emplace_back(t);
    for (const VllmLayout::Stack& p : layout.parameters())
      for (Index rank = 0; rank < ranks_; ++rank) TRY(add_parameter(TRY(layout.local(p, rank)), {p.stage, rank}));
    for (JoinedTensor& t : tensors_) TRY(catalog_.add(std::move(t.tensor)));
    catalog_.attributes.emplace_back("format", "vLLM sharded_state of " + count_of(stages_ * ranks_, "worker"));
    return finish(options);
  }

 private:
  static std::string text_of(const Worker& worker, Index stages) {
    return "worker " + std::to_string(worker.rank) + (stages > 1 ? " of stage " + std::to_string(worker.stage) : "");
  }

  Status read_worker(const PathSnapshot& place, const Worker& worker, const OpenOptions& options) {
    const Index number = worker_number(worker);
    for (Index part = 0; part == 0 || place.has_file(file_name(worker, stages_, part)); ++part) {
      const auto opened = TRY(open_if_whole(file_name(worker, stages_, part), options));
      if (!opened) continue;
      catalog_.files[opened->file].writer = number;
      add_header_metadata(opened->content->metadata());
      for (const TensorFile::Entry& entry : opened->content->tensors())
        if (!parts_.add(entry.name, number, in_file(entry.tensor, opened->file), entry.tensor.dtype))
          return corrupt(catalog_.file_path(opened->file) + ": " + tensor_text(entry.name) +
                         " is also in another part of " + text_of(worker, stages_));
    }
    return {};
  }

  // Returns the layout of the tensors that the first workers of the stages have.
  Result<VllmLayout> find_layout(Families families) {
    const auto found_config = TRY(config_of(*this, {}, families));
    if (!found_config)
      return unsupported(
          catalog_.root +
          ": expected a model's config.json next to vLLM's sharded_state, which is needed to unstack its "
          "parameters; got none");
    const ModelConfig& config = *found_config;
    const std::string& path = config.path;
    const Family* family = family_of_model_type(config.model_type, {}, families);
    if (!family)
      return unsupported(path + ": model_type '" + printable(config.model_type) + "' belongs to no known family");
    const bool is_tied = stages_ > 1 ? config.tie_word_embeddings() : part_of_stages(kEmbedding) == nullptr;
    LayoutRequest request;
    request.mesh = Mesh({{"pp", stages_}, {"tp", ranks_}});
    request.heads = HeadCounts{config.num_attention_heads(), config.num_key_value_heads()};
    std::set<std::string> used;
    for (const Parameter& p : TRY(parameters(*family, config))) {
      const auto known = find_rule(p.name);
      if (!known || (is_tied && p.name == kHead)) continue;
      const std::string name = is_tied && p.name == kEmbedding ? std::string(kHead) : known->parameter;
      const RankPart* const found = part_of_stages(name);
      if (found == nullptr) continue;
      used.insert(name);
      if (is_tied && stages_ > 1) used.insert(std::string(kEmbedding));
      request.tensors.push_back({p.name, found->stored.dtype, p.shape, {p.name}, {}});
    }
    for (const auto& [name, parts] : parts_.all())
      if (const RankPart* const part = part_of_stages(name); part && !used.contains(name) && !is_scale(name))
        return unsupported(catalog_.file_path(part->stored.extent.file) + ": " + tensor_text(name) +
                           " is not a parameter of the model in " + path);
    return VllmLayout::make(std::move(request)).context(catalog_.root);
  }

  Status add_parameter(const LocalTensor& local, const Worker& worker) {
    const RankParts::Parts* const parts = parts_.find(local.name);
    const RankPart* const found = parts ? parts->of(worker_number(worker)) : nullptr;
    const std::string what = text_of(worker, stages_) + ": " + tensor_text(local.name) + ": expected ";
    if (!found && is_partial()) return {};
    if (!found) return corrupt(catalog_.root + ": " + what + "it, as worker 0 has it; it is missing");
    const StoredTensor& stored = found->stored;
    if (stored.shape() != local.shape || stored.dtype != local.dtype)
      return corrupt(catalog_.file_path(stored.extent.file) + ": " + what + type_text(local.dtype, local.shape) +
                     " from config.json, got " + type_text(stored));
    for (const LocalPart& part : local.parts) tensors_[part.tensor].add(stored, part.place);
    return {};
  }

  Index worker_number(const Worker& worker) const { return worker.stage * ranks_ + worker.rank; }

  // Returns the part of the first worker of the first stage that has the tensor, or null. All workers of a stage have
  // the same tensors, so others than the first matter only if files cannot be read.
  const RankPart* part_of_stages(std::string_view name) const {
    const RankParts::Parts* const parts = parts_.find(name);
    if (!parts) return nullptr;
    for (Index stage = 0; stage < stages_; ++stage)
      for (Index rank = 0; rank < (is_partial() ? ranks_ : 1); ++rank)
        if (const RankPart* const part = parts->of(worker_number({stage, rank}))) return part;
    return nullptr;
  }

  Index stages_ = 1, ranks_ = 1;
  RankParts parts_;                    // by worker_number()
  std::vector<JoinedTensor> tensors_;  // for each tensor of the layout's request
};

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<VllmReader>(place, options);
}

}  // namespace reshard::vllm
