#include "formats/tensor_files/reader.h"

#include <map>
#include <set>

#include "formats/vllm/layout.h"
#include "formats/vllm/vllm.h"
#include "lib/base/text.h"
#include "lib/model/config.h"
#include "lib/model/family.h"
#include "lib/model/parameters.h"

namespace reshard::vllm {
namespace {

// Joins the parameters of the workers to the model that the config.json beside them describes.
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
  struct Part {
    std::uint32_t file = 0;
    StoredTensor stored;
  };

  static std::string text_of(const Worker& worker, Index stages) {
    return "worker " + std::to_string(worker.rank) + (stages > 1 ? " of stage " + std::to_string(worker.stage) : "");
  }

  Status read_worker(const PathSnapshot& place, const Worker& worker, const OpenOptions& options) {
    parts_.emplace_back();
    for (Index part = 0; part == 0 || place.has_file(file_name(worker, stages_, part)); ++part) {
      const OpenFile opened = TRY(open_file(file_name(worker, stages_, part), options));
      catalog_.files[opened.file].writer = std::ssize(parts_) - 1;
      add_header_metadata(opened.content->metadata());
      for (const TensorFile::Entry& entry : opened.content->tensors())
        if (!parts_.back().emplace(entry.name, Part{opened.file, entry.tensor}).second)
          return corrupt(catalog_.file_path(opened.file) + ": " + tensor_text(entry.name) + " is in another part of " +
                         text_of(worker, stages_) + " too");
    }
    return {};
  }

  // That of the tensors which the first workers of the stages have.
  Result<VllmLayout> find_layout(Families families) {
    const auto found_config = TRY(config_of(*this, {}, families));
    if (!found_config)
      return unsupported(catalog_.root +
                         ": expected a config.json beside vLLM's sharded_state, which says how its parameters are "
                         "stacked; got none of a model");
    const ModelConfig& config = *found_config;
    const std::string& path = config.path;
    const Family* family = family_of_model_type(config.model_type, {}, families);
    if (!family) return unsupported(path + ": model_type '" + printable(config.model_type) + "' is of no family known");
    std::map<std::string, Part, std::less<>> stored = parts_.front();
    for (Index stage = 1; stage < stages_; ++stage)
      stored.insert(parts_of({stage, 0}).begin(), parts_of({stage, 0}).end());
    const bool is_tied = stages_ > 1 ? config.tie_word_embeddings() : !stored.contains(kEmbedding);
    LayoutRequest request;
    request.mesh = Mesh({{"pp", stages_}, {"tp", ranks_}});
    request.heads = HeadCounts{config.num_attention_heads(), config.num_key_value_heads()};
    std::set<std::string_view> used;
    for (const Parameter& p : TRY(parameters(*family, config))) {
      const auto known = find_rule(p.name);
      const auto found = known ? stored.find(is_tied && p.name == kEmbedding ? kHead : known->parameter) : stored.end();
      if (found == stored.end() || (is_tied && p.name == kHead)) continue;
      used.insert(found->first);
      if (is_tied && stages_ > 1) used.insert(kEmbedding);
      request.tensors.push_back({p.name, found->second.stored.dtype, p.shape, {p.name}, {}});
    }
    for (const auto& [name, part] : stored)
      if (!used.contains(name) && !is_scale(name))
        return unsupported(catalog_.file_path(part.file) + ": " + tensor_text(name) + " is no parameter that " + path +
                           " describes");
    return VllmLayout::make(std::move(request)).context(catalog_.root);
  }

  Status add_parameter(const LocalTensor& local, const Worker& worker) {
    const auto& stored = parts_of(worker);
    const auto found = stored.find(local.name);
    const std::string what = text_of(worker, stages_) + ": " + tensor_text(local.name) + ": expected ";
    if (found == stored.end()) return corrupt(catalog_.root + ": " + what + "it, as worker 0 has it; it is not there");
    const auto& [file, tensor] = found->second;
    if (tensor.shape() != local.shape || tensor.dtype != local.dtype)
      return corrupt(catalog_.file_path(file) + ": " + what + std::string(info(local.dtype).torch_name) +
                     to_string(local.shape) + " by the config.json, got " + std::string(info(tensor.dtype).torch_name) +
                     to_string(tensor.shape()));
    for (const LocalPart& part : local.parts)
      tensors_[part.tensor].add(local.shape, part.place, {file, tensor.extent.offset, tensor.extent.length});
    return {};
  }

  const std::map<std::string, Part, std::less<>>& parts_of(const Worker& worker) const {
    return parts_[static_cast<std::size_t>(worker.stage * ranks_ + worker.rank)];
  }

  Index stages_ = 1, ranks_ = 1;
  std::vector<std::map<std::string, Part, std::less<>>> parts_;  // of each worker, stage by stage, by name
  std::vector<JoinedTensor> tensors_;                            // of the request
};

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<VllmReader>(place, options);
}

}  // namespace reshard::vllm
